"""What ``stopmim eval`` does: open things, measure, note every number, and show a table."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from stopmim.base.errors import StorageError, UserError
from stopmim.base.files import append_jsonl
from stopmim.data.images import Images
from stopmim.data.sources.scenes import Scenes
from stopmim.data.subset import Subset, underlying
from stopmim.data.videos import Year
from stopmim.evals import table
from stopmim.evals.compare import compare
from stopmim.evals.finetune import RECIPES, finetune
from stopmim.evals.inputs import (
    choose_labels,
    middle,
    native_size,
    open_at,
    open_pair,
    paired_labels,
    untrained,
)
from stopmim.evals.linear import Selection
from stopmim.evals.lowshot import listed, per_class
from stopmim.evals.recipes import OWN, TASKS
from stopmim.evals.results import Result
from stopmim.evals.suite import PROTOCOLS, Options, beside_untrained, measure_videos, suite
from stopmim.evals.tracking import Tracking
from stopmim.gpu.devices import choose_device, choose_precision
from stopmim.method.encoder import Encoder, VisionTransformer

LAYERS = {"last": (1,), "last4": (4,), "both": (1, 4)}
SELECTIONS: dict[str, tuple[Selection, ...]] = {
    "held-out": ("held-out",),
    "paper": ("paper",),
    "both": ("held-out", "paper"),
}
Branch = Literal["target", "context"]


@dataclasses.dataclass(frozen=True)
class Request:
    """The options of the command line, as words and numbers."""

    data: str | None = None
    train: str | None = None
    test: str | None = None
    hold_out: float | None = None
    skip: Path | None = None
    videos: str | None = None
    video_size: int | None = None
    tracking: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    year: Year | None = None
    pictures: Path | None = None
    label: Sequence[str] = ()
    selection: str = "held-out"
    layers: str = "both"
    recipe: str = "auto"
    views: int = 0
    per_class: int = 25
    list: Path | None = None
    released: bool = False
    size: int | None = None
    branch: Branch = "target"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    seed: int = 0
    out: Path | None = None

    def __post_init__(self) -> None:
        for name, low in {"size": 1, "video_size": 1, "views": 0, "seed": 0}.items():
            given = getattr(self, name)
            if given is not None and given < low:
                raise UserError(f"--{name.replace('_', '-')} {given}: expected {low} or more")


def evaluate(name: str, request: Request, protocols: Sequence[str] = PROTOCOLS) -> str:
    """Measures the encoder called `name` and returns the table; the whole suite makes pages too."""
    encoder, step = open_at(name, request.branch)
    lines = destination(name, request.out)
    results, facts = asked(name, encoder, request, protocols)
    facts["step"] = step
    note(lines, [result.as_dict() for result in results], facts)
    shown = table.text(table.rows(results))
    if len(protocols) > 1 and lines is not None:
        title = f"What {Path(name).name or name} knows"
        shown += f"\n\n{table.write(lines.parent, results, title, facts)}"
    return shown


def asked(
    name: str, encoder: Encoder, request: Request, protocols: Sequence[str]
) -> tuple[list[Result], dict[str, Any]]:
    """The results of `protocols`, and the facts that are noted with each."""
    train, test = _images(request, encoder)
    if request.videos is None and isinstance(underlying(test), Scenes):
        request = dataclasses.replace(request, videos="scenes")
    options = options_of(request, encoder, protocols, test)
    facts = _facts(name, request, train, test)
    if "tracking" in protocols and request.videos is not None:
        facts["videos"] = request.videos
    return suite(encoder, train, test, options), facts


def track(name: str, request: Request) -> str:
    """Tracking alone, on `request.videos`."""
    encoder, step = open_at(name, request.branch)
    lines = destination(name, request.out)
    results, facts = tracked(name, encoder, request)
    facts["step"] = step
    note(lines, [result.as_dict() for result in results], facts)
    return table.text(table.rows(results))


def tracked(name: str, encoder: Encoder, request: Request) -> tuple[list[Result], dict[str, Any]]:
    """The results of tracking, and the facts that are noted with each."""
    request = dataclasses.replace(request, videos=request.videos or "scenes")
    options = options_of(request, encoder, ("tracking",), None)
    results = beside_untrained(
        encoder,
        request.seed,
        # The twin is measured, but nobody wants to see what it finds.
        lambda e: measure_videos(e, options, request.pictures if e is encoder else None),
    )
    facts = {"encoder": name, "videos": str(request.videos), "branch": request.branch}
    size = request.video_size or request.size
    return results, facts | ({"size": size} if size else {})


def tune(
    name: str, request: Request, recipe: str, changes: Mapping[str, Any], *, beside: bool = False
) -> str:
    """Fine-tunes the whole encoder; with `beside` also one from random weights."""
    encoder, step = open_at(name, request.branch)
    lines = destination(name, request.out)
    results, facts = tuned(name, encoder, request, recipe, changes, beside=beside)
    facts["step"] = step
    note(lines, [result.as_dict() for result in results], facts)
    return table.text(table.rows(results))


def tuned(
    name: str,
    encoder: Encoder,
    request: Request,
    recipe: str,
    changes: Mapping[str, Any],
    *,
    beside: bool = False,
) -> tuple[list[Result], dict[str, Any]]:
    """The results of fine-tuning, and the facts that are noted with each."""
    if not isinstance(encoder, VisionTransformer):
        raise UserError(f"{name}: only a Vision Transformer of ours can be fine-tuned")
    train, test = _images(request, encoder)
    options = options_of(request, encoder, (), test)
    given = {key: value for key, value in changes.items() if value is not None}
    results: list[Result] = []
    for label in choose_labels(train, test, request.label):
        y, _ = paired_labels(train, test, label)
        part, many, found = train, "", list[list[Result]]()
        if request.list is not None:
            part, many = Subset(train, listed(train, request.list)), f"{request.list.name}, "
        elif request.per_class:
            index = per_class(y, request.per_class, request.seed)
            part, many = Subset(train, index), f"{int(y[index].bincount().max())}/class, "
        for start in (encoder, untrained(encoder, request.seed)) if beside else (encoder,):
            found.append(
                finetune(
                    start,
                    part,
                    test,
                    label,
                    dataclasses.replace(RECIPES[recipe], **given),
                    view=options.view or middle(encoder, test),
                    selections=options.selections,
                    seed=request.seed,
                    device=options.device,
                    precision=options.precision,
                )
            )
        results += [
            dataclasses.replace(
                own,
                random_init=twin.value if beside else None,
                setting=f"{many}{own.setting}",
            )
            for own, twin in zip(found[0], found[-1], strict=True)
        ]
    return results, _facts(name, request, train, test)


def contrast(a: str, b: str, request: Request) -> str:
    """Two encoders on the same images, with a paired test."""
    (first, _), (second, step) = (open_at(name, request.branch) for name in (a, b))
    train, test = _images(request, first)
    options = options_of(request, first, ("knn", "linear", "lowshot"), test)
    found = compare(first, second, train, test, options)
    facts = {"A": a, "B": b} | _facts(b, request, train, test) | {"step": step}
    note(destination(None, request.out), [c.as_dict() for c in found], facts)
    return table.text(table.compared(found))


def options_of(
    request: Request, encoder: Encoder, protocols: Sequence[str], test: Images | None
) -> Options:
    size = request.size or native_size(encoder)
    patch = getattr(encoder, "patch", 1)
    if size % patch:
        raise UserError(f"--size {size}: not a multiple of the patch size, {patch}")
    device = choose_device(request.device)
    task = TASKS.get(request.recipe)
    video_size = request.video_size or Tracking.size
    if request.video_size is None and (request.videos or "").split(":")[0] == "scenes":
        video_size = 2 * size  # drawn at 64 px: 480 would be a blur
    views = task.views(encoder).at(size) if task else None
    view = views and views.test
    if request.size is not None and task is None and test is not None:
        view = middle(encoder, test, size)  # without a wish each encoder has its own
    return Options(
        protocols=tuple(protocols),
        labels=tuple(request.label),
        selections=SELECTIONS[request.selection],
        layers=LAYERS[request.layers],
        recipe=task.heads(encoder) if task else OWN if request.recipe == "own" else None,
        view=view,
        train_view=views and views.train,
        views=request.views,
        videos=request.videos,
        tracking=Tracking(size=video_size, **request.tracking),
        year=request.year,
        few=request.list or request.per_class,
        released=request.released,
        seed=request.seed,
        device=device,
        precision=choose_precision(request.precision, device),
    )


def _images(request: Request, encoder: Encoder) -> tuple[Images, Images]:
    parts = request.data, request.train, request.test
    return open_pair(
        *parts, encoder, hold_out=request.hold_out, skip=request.skip, seed=request.seed
    )


def _facts(name: str, request: Request, train: Images, test: Images) -> dict[str, Any]:
    def source(images: Images, given: str | None) -> str:
        where = str(images) if isinstance(images, Scenes) else given or images.fingerprint
        return f"{where} ({len(images)} images)"

    facts = {
        "encoder": name,
        "branch": request.branch,
        "train_data": source(train, request.train or request.data),
        "test_data": source(test, request.test or request.data),
        "seed": request.seed,
    }
    return facts | ({"size": request.size} if request.size else {})


def destination(name: str | None, out: Path | None) -> Path | None:
    """The file of results: that of --out (a file, or a folder for results.jsonl), or of the run."""
    if out is None:
        run = name is not None and (Path(name) / "run.json").exists()
        return Path(str(name)) / "results.jsonl" if run else None
    path = out if out.suffix and not out.is_dir() else out / "results.jsonl"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{out}: cannot write here: {error.strerror}") from None
    return path


def note(path: Path | None, lines: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> None:
    if path is None:
        return
    try:
        for line in lines:
            append_jsonl(path, dict(facts) | dict(line))
    except OSError as error:
        raise StorageError(f"{path}: cannot write here: {error.strerror}") from None
