"""`report.html` of a run: one self-contained file to open, print or send.

This module only collects: the figures compute what is shown, and page.html puts it into words.

Everything in a run directory except the figures counts as hostile text: it reaches the page through
the template, which escapes it, or as JSON, which the script turns into text and never into tags.
The browser may run that one script, by its hash, and no other.
"""

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from stopmim._version import __version__
from stopmim.base.console import visible
from stopmim.base.errors import UserError
from stopmim.base.files import number, write_whole
from stopmim.config.schema import Config, flatten, resolve
from stopmim.config.yaml_text import to_yaml
from stopmim.data.images import Images
from stopmim.data.pixels import stats_of
from stopmim.data.skip import without_skipped
from stopmim.health.doctor import Diagnosis, diagnose_run
from stopmim.health.log import Logged, measurements, training_seconds
from stopmim.health.reference import find_reference
from stopmim.insight.figures import curves, neighbours, pictures, similarity
from stopmim.insight.figures.false_colour import FalseColour
from stopmim.insight.figures.subject import images_of
from stopmim.insight.report import explorer, results
from stopmim.insight.report.results import count_text, entry
from stopmim.method.build import build, build_sampler
from stopmim.method.model import MaskedImageModel
from stopmim.runs.next_commands import how_to_evaluate
from stopmim.runs.run import Run
from stopmim.runs.verdict import newest, of_run, resolution, tallies

T = TypeVar("T")

HERE = Path(__file__).parent
PREVIEWS = 8  # images shown with their masks
# Facts about a start of the run, and their keys in run.json.
START = {"started": "time", "host": "host", "device": "device", "CPU threads": "threads"}
START |= {"command": "command", "versions": "versions", "git": "git"}


def write_report(
    run: Run,
    images: Images | None = None,
    *,
    others: Sequence[Run] = (),
    out: Path | None = None,
    show: Sequence[str] = (),
) -> Path:
    """Writes `report.html` of `run` from whatever exists, and returns its path.

    Without `images`, those that run.json names are opened; either way they are shown only if the
    run was trained on them. `others` are compared with the run, in curves and a table. `show` are
    the channels for pictures of images that are not RGB.
    """
    runs = [run, *others]
    about, *_ = [one.about for one in runs]  # raises if one is not a run
    metrics, lines = run.metrics, run.results
    last = metrics[-1] if metrics else {}
    described, config_missing = _attempt(lambda: _described(run, about))
    config, network = described or (None, None)
    if config:
        FalseColour.of(stats_of(config), show)  # a wrong channel is an error, not a missing picture
    shown, missing = _attempt(lambda: _images(run, config, images))
    views, views_missing = _attempt(lambda: _views(_known(shown, missing), config, show))
    near, near_missing = _attempt(lambda: neighbours.find([run], _known(shown, missing), show))
    model, model_missing = _attempt(run.model)
    explored, similar = _of_model(run, config, model, views)
    reference = find_reference(config, about.get("data")) if config else None
    stretched = reference.stretched(_updates(config, last)) if config and reference else []
    explored["charts"] = explorer.charts(runs, stretched)
    explored["neighbours"] = near and explorer.neighbours(near)
    text = _ENVIRONMENT.get_template("page.html").render(
        name=run.path.resolve().name,
        path=run.path.resolve(),
        config=config,
        config_missing=config_missing,
        config_lines=_config_lines(about, config),
        network=network,
        masks=build_sampler(config).describe() if config else "",
        data=_mapping(about.get("data")),
        last=last,
        seconds=training_seconds(metrics, config.optim.batch_size) if config else 0,
        starts=[_start(_mapping(start)) for start in _sequence(about.get("starts"))],
        diagnosis=_diagnosis(run),
        **_judged(run, lines),
        reference=reference,
        compared=[_compared(one) for one in runs] if others else [],
        panels=_panels(metrics),
        lost=run.lost_lines,
        views=views,
        views_missing=views_missing,
        near=near,
        near_missing=near_missing,
        model=model,
        model_missing=model_missing,
        similar=similar,
        explored=explored,
    )
    write_whole(path := out or run.path / "report.html", text)
    return path


def _of_model(
    run: Run,
    config: Config | None,
    model: MaskedImageModel | None,
    views: list[pictures.Preview] | None,
) -> tuple[dict[str, Any], similarity.Similarity | None]:
    """Predictions and positions for the script, and the similarity of positions for a figure."""
    explored: dict[str, Any] = {"predictions": None, "positions": None}
    if not config or not model:
        return explored, None
    explored["predictions"] = views and explorer.predictions(run, config, views)
    positions = model.predictor.positions
    if not positions.uncertain or positions.conditioned:
        return explored, None
    # The same noise for all images.
    explored["positions"] = explorer.positions(model, config.seed)
    return explored, similarity.of_model(model, config.seed)


def _judged(run: Run, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The results and the conclusions from them."""
    own = of_run(lines)
    return {
        "conclusions": [tally.sentence for tally in tallies(own)],
        "resolution": resolution(newest(own)),
        "evaluate": how_to_evaluate(run),
        "results": results.table(lines),
    }


def _visible(value: object) -> str:
    """`value` as text without control characters; jinja escapes HTML in all but Markup."""
    return value if isinstance(value, Markup) else visible(str(value))


_ENVIRONMENT = Environment(
    loader=FileSystemLoader([HERE, HERE.parents[1] / "base"]),  # page.html, page.css
    autoescape=True,  # not jinja's default
    finalize=_visible,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.globals |= {
    "version": __version__,
    "entry": entry,
    "script": Markup(explorer.SCRIPT),
    "digest": base64.b64encode(hashlib.sha256(explorer.SCRIPT.encode()).digest()).decode(),
    "svg": lambda figure, name: Markup(pictures.svg(figure, name)),
    "draw_curves": curves.figure,
    "draw_preview": pictures.figure,
    "draw_similarity": similarity.figure,
    "agreement": neighbours.agreement,
    "by_chance": neighbours.by_chance,
    "kept": neighbours.kept,
    "kinds": neighbours.kinds,
}
_ENVIRONMENT.filters |= {
    "count": count_text,
    "duration": results.time_text,
    "json": lambda tree: Markup(explorer.as_json(tree)),
}


def _attempt(make: Callable[[], T]) -> tuple[T | None, str]:
    """The result of `make`, or why it is missing from the page."""
    try:
        return make(), ""
    except (UserError, ValueError, OSError) as error:  # pydantic's is a ValueError
        return None, " ".join(str(error).split())


def _known(found: T | None, missing: str) -> T:
    """Result of an attempt, or else the reason, for whatever needs the result."""
    if found is None:
        raise UserError(missing)
    return found


def _mapping(tree: object) -> dict[str, Any]:
    return tree if isinstance(tree, dict) else {}


def _sequence(tree: object) -> list[Any]:
    return tree if isinstance(tree, list) else []


# ------------------------------------------------------------------------------ the parts


def _described(run: Run, about: dict[str, Any]) -> tuple[Config, MaskedImageModel]:
    """The config of a run, and its model without weights, for their descriptions."""
    if "config" not in about:
        raise UserError("run.json has no config")
    config = resolve(run.config)
    with torch.device("meta"):
        return config, build(config)


def _config_lines(about: dict[str, Any], config: Config | None) -> list[str]:
    """The config as YAML with the meaning of every key; an invalid one as it is in run.json."""
    if config is not None:
        return to_yaml(config).splitlines()
    return [f"{key}: {value}" for key, value in flatten(_mapping(about.get("config")))]


def _updates(config: Config, last: Logged) -> float:
    """Updates of the whole run, estimated from its last line."""
    step, epoch = number(last.get("step")), number(last.get("epoch"))
    return config.optim.epochs * step / epoch if step and epoch else 1.0


def _diagnosis(run: Run) -> Diagnosis | None:
    try:
        return diagnose_run(run)
    except (TypeError, KeyError, ValueError, UserError):  # lines or a config that are not ours
        return None


def _compared(run: Run) -> dict[str, str]:
    """A line of the table of runs."""
    metrics, found = run.metrics, _diagnosis(run)
    evaluations = [
        f"{tally}, on {tally.data}".removesuffix(", on ") for tally in tallies(of_run(run.results))
    ]
    last = metrics[-1] if metrics else {}
    measured: Logged = (measurements(metrics)[1] or [{}])[-1]

    def text(line: Logged, key: str) -> str:
        value = number(line.get(key))
        return "-" if value is None else f"{value:.3g}"

    return {
        "run": run.path.resolve().name,
        "verdict": found.verdict if found else "-",
        "updates": count_text(last.get("step")) or "-",
        "loss": text(last, "loss"),
        "rank": text(measured, "feature_rank" if "feature_rank" in measured else "target_rank"),
        "skill": text(measured, "skill"),
        "evaluation": "; ".join(evaluations) or "-",
    }


def _panels(metrics: Sequence[Logged]) -> list[tuple[curves.Panel, dict[str, curves.Curve]]]:
    """The panels of curves that have a value; empty before the first logged step."""
    found = [
        (
            panel,
            {name: curves.curve(metrics, key, low=panel.low) for key, name in panel.series.items()},
        )
        for panel in curves.PANELS
    ]
    return [(panel, drawn) for panel, drawn in found if any(len(c.step) for c in drawn.values())]


def _images(run: Run, config: Config | None, images: Images | None) -> Images:
    """The images that the run was trained on; raises UserError for any others."""
    if config is None:
        raise UserError("the masks are drawn from the config, which cannot be read")
    images = images_of(run) if images is None else without_skipped(images, config.data.skip)
    if images.fingerprint != _mapping(run.about.get("data")).get("fingerprint"):
        raise UserError("the images found now are not those that the run was trained on")
    return images


def _views(images: Images, config: Config | None, show: Sequence[str]) -> list[pictures.Preview]:
    config = _known(config, "the config cannot be read")
    found = pictures.previews(images, config, 0, PREVIEWS, show)
    if not found:
        raise UserError("none of the first images can be read")
    return found


def _start(start: dict[str, Any]) -> dict[str, str]:
    """The environment of a start; unknown facts are left out."""
    versions, command = _mapping(start.get("versions")), _sequence(start.get("command"))
    start |= {"command": " ".join(map(str, command))}
    start |= {"versions": ", ".join(f"{name} {version}" for name, version in versions.items())}
    return {name: text for name, key in START.items() if (text := entry(start, key))}
