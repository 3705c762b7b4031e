"""`report.html` of a run: one file to open, print or send, that loads nothing.

Formats only; what it shows is computed in `analysis`. Everything in a run directory but the figures
is taken for hostile text: it reaches the page through the template, which escapes it, or as JSON,
of which the script makes text and never tags. The browser is told to run that one script, by its
hash, and no other.
"""

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from stopmim._version import __version__
from stopmim.base.errors import UserError
from stopmim.base.files import write_whole
from stopmim.config.schema import Config, flatten, to_yaml
from stopmim.data.images import Images
from stopmim.data.skip import without_skipped
from stopmim.data.sources.open import open_images
from stopmim.health.doctor import Diagnosis, diagnose
from stopmim.health.reference import find_reference as reference
from stopmim.insight.figures import curves, pictures, similarity
from stopmim.insight.report import explorer
from stopmim.insight.report.results import best, count, differing, said, shown, time
from stopmim.method.model import MaskedImageModel
from stopmim.runs.run import Run

T = TypeVar("T")

HERE = Path(__file__).parent
PREVIEWS = 8  # images shown with their masks


class Shown(NamedTuple):
    """A figure of the page."""

    svg: Markup
    alt: str


def write(
    run: Run,
    images: Images | None = None,
    *,
    others: Sequence[Run] = (),
    out: Path | None = None,
) -> Path:
    """Writes `report.html` of `run` from whatever is there, and returns its path.

    Without `images`, those that run.json names are opened again; either way they are shown only if
    they are the ones the run began with. `others` are set beside it, in curves and a table.
    """
    about, *_ = [one.about for one in (run, *others)]  # what is no run is refused
    metrics, results = run.metrics, run.results
    differ = differing(results)
    config, config_missing = _attempt(lambda: _config(run, about))
    views, previews_missing = _attempt(lambda: _views(about, config, images))
    model, model_missing = _attempt(run.model)
    runs = [run, *others]
    ours = None if config is None else reference(config)
    data = {
        "charts": explorer.charts(
            [(_name(one), one.metrics) for one in runs],
            ours.stretched(_updates(config, metrics)) if config and ours else None,
        ),
        "predictions": explorer.predictions(run, config, views)
        if config is not None and model is not None and views
        else None,
        "positions": explorer.positions(model, config.seed)
        if config is not None and model is not None
        else None,
    }
    script = explorer.script()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = _environment().get_template("page.html")
    text = page.render(
        name=_name(run),
        path=run.path.resolve(),
        version=__version__,
        summary=_summary(about, config, metrics),
        diagnosis=_diagnosis(metrics, config),
        reference=ours.name if ours else None,
        best=best(results),
        results=[shown(line, differ) for i, line in enumerate(results) if line not in results[:i]],
        panels=_panels(metrics),
        previews=_previews(views, config) if views and config else None,
        previews_missing=previews_missing,
        similarity=_similarity(config, model),
        model_missing=model_missing,
        compared=[_compared(one) for one in runs] if others else [],
        config_lines=_config_lines(about, config),
        config_missing=config_missing,
        starts=[_start(_mapping(start)) for start in _sequence(about.get("starts"))],
        has_predictions=data["predictions"] is not None,
        has_positions=data["positions"] is not None,
        data=Markup(explorer.as_json(data)),
        script=Markup(script),
        digest=digest,
    )
    path = out or run.path / "report.html"
    write_whole(path, text)
    return path


def _name(run: Run) -> str:
    return run.path.resolve().name


def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader([HERE, HERE.parents[1] / "base"]),  # page.html, page.css
        autoescape=True,  # not jinja's default
        finalize=_visible,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _visible(value: object) -> str:
    """`value` as text without control characters, text direction marks and lone surrogates.

    They come out as ``repr`` writes them; escaping what HTML would read is left to jinja.
    """
    if isinstance(value, Markup):
        return value
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(value)
    )


def _attempt(make: Callable[[], T]) -> tuple[T | None, str]:
    """What `make` returns, or why it is missing from the page."""
    try:
        return make(), ""
    except (UserError, ValueError, OSError) as error:  # pydantic's is a ValueError
        return None, " ".join(str(error).split())


def _mapping(tree: object) -> dict[str, Any]:
    return tree if isinstance(tree, dict) else {}


def _sequence(tree: object) -> list[Any]:
    return tree if isinstance(tree, list) else []


# ------------------------------------------------------------------------------ the parts


def _config(run: Run, about: dict[str, Any]) -> Config:
    if "config" not in about:
        raise UserError("run.json has no config")
    return run.config


def _config_lines(about: dict[str, Any], config: Config | None) -> list[str]:
    """The config as YAML with the meaning of every key; one that is not valid as it was found."""
    if config is not None:
        return to_yaml(config).splitlines()
    return [f"{key}: {value}" for key, value in flatten(_mapping(about.get("config")))]


def _summary(
    about: dict[str, Any], config: Config | None, metrics: Sequence[Mapping[str, Any]]
) -> dict[str, str]:
    """What was trained on what, for how long; a key that is missing here is unknown."""
    data, last = _mapping(about.get("data")), metrics[-1] if metrics else {}
    starts = [_mapping(start) for start in _sequence(about.get("starts"))]
    facts = {
        "source": data.get("source"),
        "images": count(data.get("images")),
        "step": count(last.get("step")),
        "epoch": count(last.get("epoch")),
        "device": starts[-1].get("device") if starts else None,
    }
    if config is not None:
        seconds = curves.training_seconds(metrics, config.optim.batch_size)
        facts |= {
            "arch": config.arch,
            "method": _method(config),
            "sigma": None if config.positions.sigma is None else f"{config.positions.sigma:g}",
            "pixels": str(config.image_size),
            "epochs": count(config.optim.epochs),
            "time": time(seconds) if seconds else None,
        }
    return {key: str(value) for key, value in facts.items() if value not in (None, "")}


_POSITIONS = {
    "stochastic": " + StoP",
    "sincos": "",
    "learned": " with learned positions",
    "jitter": " with jittered positions",
}


def _method(config: Config) -> str:
    base = "I-JEPA" if config.target == "features" else "MAE"
    return base + _POSITIONS[config.positions.kind]


def _updates(config: Config, metrics: Sequence[Mapping[str, Any]]) -> float:
    """Those of the whole run, as far as its last line tells."""
    last = metrics[-1] if metrics else {}
    step, epoch = curves.number(last.get("step")), curves.number(last.get("epoch"))
    return config.optim.epochs * step / epoch if step and epoch else 1.0


def _diagnosis(
    metrics: Sequence[Mapping[str, Any]], config: Config | None = None
) -> Diagnosis | None:
    try:
        return diagnose(metrics, config)
    except (TypeError, KeyError, ValueError):  # lines that no run of ours wrote
        return None


def _compared(run: Run) -> dict[str, str]:
    """A line of the table of runs."""
    metrics, top, found = run.metrics, best(run.results), _diagnosis(run.metrics)
    last: Mapping[str, Any] = metrics[-1] if metrics else {}
    measured = [row for row in metrics if "target_rank" in row]
    what = ", ".join(filter(None, (f"{top.protocol} {top.label}", top.of))) if top else ""

    rank = "feature_rank" if measured and "feature_rank" in measured[-1] else "target_rank"

    def text(row: Mapping[str, Any], key: str) -> str:
        value = curves.number(row.get(key))
        return "-" if value is None else f"{value:.3g}"

    return {
        "run": _name(run),
        "verdict": found.verdict if found else "-",
        "updates": count(last.get("step")) or "-",
        "loss": text(last, "loss"),
        "rank": text(measured[-1], rank) if measured else "-",
        "skill": text(measured[-1], "skill") if measured else "-",
        "best": f"{top.value} ({what}, {top.difference})" if top else "-",
    }


def _panels(metrics: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The curves that have a value; empty before the first logged step."""
    shown: list[dict[str, Any]] = []
    for panel in curves.PANELS:
        drawn = {label: curves.curve(metrics, key, low=panel.low) for key, label in panel.series}
        if not any(len(curve.step) for curve in drawn.values()):
            continue
        alt = "; ".join(
            f"{label}: {c.mean[0]:.3g} at step {c.step[0]:.0f}, "
            f"{c.mean[-1]:.3g} at step {c.step[-1]:.0f}"
            for label, c in drawn.items()
            if len(c.step)
        )
        name = f"curve{len(shown)}"
        svg = Markup(pictures.svg(curves.figure(list(drawn.values())), name))
        figure = Shown(svg, f"{panel.title}. {alt}.")
        shown.append({"panel": panel, "labels": list(drawn), "figure": figure})
    return shown


def _views(
    about: dict[str, Any], config: Config | None, images: Images | None
) -> list[pictures.Preview]:
    data = _mapping(about.get("data"))
    if config is None:
        raise UserError("the masks are drawn from the config, which cannot be read")
    if images is None:
        if not (source := said(data, "source")):
            raise UserError("run.json does not say where they are")
        images = open_images(source)
    images = without_skipped(images, config.data.skip)
    if images.fingerprint != data.get("fingerprint"):
        raise UserError("the images found now are not those that the run began with")
    found = pictures.previews(images, config, step=0, count=PREVIEWS)
    if not found:
        raise UserError("none of the first images can be read")
    return found


def _previews(found: list[pictures.Preview], config: Config) -> dict[str, Any]:
    blocks, size = found[0].targets.shape
    seen = len(found[0].context)
    figures = [
        Shown(
            Markup(pictures.svg(pictures.figure(preview), f"mask{i}")),
            f"Training image {i + 1}: {seen} of {config.side**2} patches are seen, "
            f"{blocks} outlined target blocks of {size} patches are to be predicted.",
        )
        for i, preview in enumerate(found)
    ]
    return {
        "figures": figures,
        "seen": seen,
        "patches": config.side**2,
        "side": config.side,
        "blocks": blocks,
        "size": size,
        "random": config.masking.kind == "random",
    }


def _similarity(config: Config | None, model: MaskedImageModel | None) -> dict[str, Any] | None:
    """The figure, for a model whose positions have noise, and the same noise for all images."""
    if config is None or model is None:
        return None
    positions = model.predictor.positions
    if not positions.uncertain or positions.conditioned:
        return None
    found = similarity.of_model(model, config.seed)
    alt = (
        f"Similarity of {len(found.queries)} positions to all {positions.side**2} fixed ones: "
        f"deterministic, one stochastic draw, and the mean of {found.draws} draws."
    )
    svg = Markup(pictures.svg(similarity.figure(found), "similarity"))
    return {
        "figure": Shown(svg, alt),
        "found": f"{100 * float(found.found.mean()):.0f} %",
        "strength": f"{100 * found.strength:.0f} %",
        "draws": found.draws,
    }


def _start(start: dict[str, Any]) -> dict[str, str]:
    versions = _mapping(start.get("versions"))
    facts = {
        "started": start.get("time"),
        "host": start.get("host"),
        "device": start.get("device"),
        "CPU threads": start.get("threads"),
        "command": " ".join(map(str, _sequence(start.get("command")))),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "git": start.get("git"),
    }
    return {key: str(value) for key, value in facts.items() if value not in (None, "")}
