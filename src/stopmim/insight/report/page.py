"""`report.html` of a run: one self-contained file to open, print or send.

This module only formats; the figures compute what is shown. Everything in a run directory but the
figures counts as hostile text: it reaches the page through the template, which escapes it, or as
JSON, which the script turns into text and never into tags. The browser may run that one script, by
its hash, and no other.
"""

import base64
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from stopmim._version import __version__
from stopmim.base.errors import UserError
from stopmim.base.files import write_whole
from stopmim.config.schema import Config, flatten, resolve
from stopmim.config.yaml_text import to_yaml
from stopmim.data.images import Images
from stopmim.data.skip import without_skipped
from stopmim.health.doctor import Diagnosis, diagnose
from stopmim.health.log import Logged, measurements, number, training_seconds
from stopmim.health.reference import Reference, find_reference
from stopmim.insight.figures import curves, pictures, similarity
from stopmim.insight.figures.subject import images_of
from stopmim.insight.report import explorer
from stopmim.insight.report.results import as_text, best_result, count_text, differing, time_text
from stopmim.method.build import build, build_sampler
from stopmim.method.model import MaskedImageModel
from stopmim.runs.run import Run

T = TypeVar("T")

HERE = Path(__file__).parent
PREVIEWS = 8  # images shown with their masks


class Drawing(NamedTuple):
    """A figure of the page, and its text for screen readers."""

    svg: Markup
    alt: str


def write_report(
    run: Run,
    images: Images | None = None,
    *,
    others: Sequence[Run] = (),
    out: Path | None = None,
) -> Path:
    """Writes `report.html` of `run` from whatever is there, and returns its path.

    Without `images`, those that run.json names are opened; either way they are shown only if the
    run was trained on them. `others` are compared with the run, in curves and a table.
    """
    runs = [run, *others]
    about, *_ = [one.about for one in runs]  # raises if one is not a run
    metrics, results = run.metrics, run.results
    config, config_missing = _attempt(lambda: _config(run, about))
    views, previews_missing = _attempt(lambda: _views(run, config, images))
    model, model_missing = _attempt(run.model)
    ours = None if config is None else find_reference(config)
    data = _explored(runs, config, model, views or [], ours)
    script, differ = explorer.script(), differing(results)
    text = (
        _environment()
        .get_template("page.html")
        .render(
            name=_name(run),
            path=run.path.resolve(),
            version=__version__,
            summary=_summary(about, config, metrics),
            diagnosis=_diagnosis(metrics, config),
            reference=ours.name if ours else None,
            best=best_result(results),
            results=[
                as_text(line, differ) for i, line in enumerate(results) if line not in results[:i]
            ],
            panels=_panels(metrics),
            previews=_previews(views, config) if views and config else None,
            previews_missing=previews_missing,
            similarity=_similarity(config, model),
            model_missing=model_missing,
            uncertain=model is not None and model.predictor.positions.uncertain,
            compared=[_compared(one) for one in runs] if others else [],
            config_lines=_config_lines(about, config),
            config_missing=config_missing,
            starts=[_start(_mapping(start)) for start in _sequence(about.get("starts"))],
            has_predictions=data["predictions"] is not None,
            has_positions=data["positions"] is not None,
            data=Markup(explorer.as_json(data)),
            script=Markup(script),
            digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        )
    )
    path = out or run.path / "report.html"
    write_whole(path, text)
    return path


def _explored(
    runs: Sequence[Run],
    config: Config | None,
    model: MaskedImageModel | None,
    views: list[pictures.Preview],
    ours: Reference | None,
) -> dict[str, Any]:
    """Data for the script of the page; None for what cannot be shown."""
    stretched = ours.stretched(_updates(config, runs[0].metrics)) if config and ours else []
    tree: dict[str, Any] = {"predictions": None, "positions": None}
    tree["charts"] = explorer.charts([(_name(run), run.metrics) for run in runs], stretched)
    if config and model and views:
        tree["predictions"] = explorer.predictions(runs[0], config, views)
    if config and model and similarity.same_for_all_images(model.predictor.positions):
        tree["positions"] = explorer.positions(model, config.seed)
    return tree


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
    """`value` as text, with control characters, direction marks and lone surrogates escaped.

    They are written as ``repr`` does; escaping HTML is left to jinja.
    """
    if isinstance(value, Markup):
        return value
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(value)
    )


def _attempt(make: Callable[[], T]) -> tuple[T | None, str]:
    """The result of `make`, or why it is missing from the page."""
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
    config = resolve(run.config)
    _described(config)  # raises if no model can be built
    return config


def _described(config: Config) -> MaskedImageModel:
    """The model of `config` without weights, to ask for its names."""
    with torch.device("meta"):
        return build(config)


def _config_lines(about: dict[str, Any], config: Config | None) -> list[str]:
    """The config as YAML with the meaning of every key; an invalid one as it is in run.json."""
    if config is not None:
        return to_yaml(config).splitlines()
    return [f"{key}: {value}" for key, value in flatten(_mapping(about.get("config")))]


def _summary(
    about: dict[str, Any], config: Config | None, metrics: Sequence[Logged]
) -> dict[str, str]:
    """Method, data and duration of the training; unknown facts are left out."""
    data, last = _mapping(about.get("data")), metrics[-1] if metrics else {}
    starts = [_mapping(start) for start in _sequence(about.get("starts"))]
    facts = {
        "source": data.get("source"),
        "images": count_text(data.get("images")),
        "step": count_text(last.get("step")),
        "epoch": count_text(last.get("epoch")),
        "device": starts[-1].get("device") if starts else None,
    }
    if config is not None:
        model, sigma = _described(config), config.positions.sigma
        seconds = training_seconds(metrics, config.optim.batch_size)
        facts |= {
            "arch": config.arch,
            "method": model.method,
            "described": f"{model.describe()}; masks: {build_sampler(config).describe()}",
            "sigma": None if sigma is None else f"{sigma:g}",
            "pixels": str(config.image_size),
            "epochs": count_text(config.optim.epochs),
            "time": time_text(seconds) if seconds else None,
        }
    return _known(facts)


def _known(facts: dict[str, Any]) -> dict[str, str]:
    return {key: str(value) for key, value in facts.items() if value not in (None, "")}


def _updates(config: Config, metrics: Sequence[Logged]) -> float:
    """Updates of the whole run, estimated from its last line."""
    last = metrics[-1] if metrics else {}
    step, epoch = number(last.get("step")), number(last.get("epoch"))
    return config.optim.epochs * step / epoch if step and epoch else 1.0


def _diagnosis(metrics: Sequence[Logged], config: Config | None = None) -> Diagnosis | None:
    try:
        return diagnose(metrics, config)
    except (TypeError, KeyError, ValueError):  # lines that no run of ours wrote
        return None


def _compared(run: Run) -> dict[str, str]:
    """A line of the table of runs."""
    metrics, best, found = run.metrics, best_result(run.results), _diagnosis(run.metrics)
    last = metrics[-1] if metrics else {}
    measured: Logged = (measurements(metrics)[1] or [{}])[-1]
    what = ", ".join(filter(None, (f"{best.protocol} {best.label}", best.of))) if best else ""

    def text(line: Logged, key: str) -> str:
        value = number(line.get(key))
        return "-" if value is None else f"{value:.3g}"

    return {
        "run": _name(run),
        "verdict": found.verdict if found else "-",
        "updates": count_text(last.get("step")) or "-",
        "loss": text(last, "loss"),
        "rank": text(measured, "feature_rank" if "feature_rank" in measured else "target_rank"),
        "skill": text(measured, "skill"),
        "best": f"{best.value} ({what}, {best.difference})" if best else "-",
    }


def _panels(metrics: Sequence[Logged]) -> list[dict[str, Any]]:
    """The panels of curves that have a value; empty before the first logged step."""
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
        svg = Markup(pictures.svg(curves.figure(list(drawn.values())), f"curve{len(shown)}"))
        figure = Drawing(svg, f"{panel.title}. {alt}.")
        shown.append({"panel": panel, "labels": list(drawn), "figure": figure})
    return shown


def _views(run: Run, config: Config | None, images: Images | None) -> list[pictures.Preview]:
    if config is None:
        raise UserError("the masks are drawn from the config, which cannot be read")
    images = images_of(run) if images is None else without_skipped(images, config.data.skip)
    if images.fingerprint != _mapping(run.about.get("data")).get("fingerprint"):
        raise UserError("the images found now are not those that the run was trained on")
    found = pictures.previews(images, config, step=0, count=PREVIEWS)
    if not found:
        raise UserError("none of the first images can be read")
    return found


def _previews(found: list[pictures.Preview], config: Config) -> dict[str, Any]:
    blocks, size = found[0].targets.shape
    seen, patches = len(found[0].context), config.side**2
    outlined = f"{blocks} outlined blocks of {size}" if blocks > 1 else f"{size} outlined"
    figures = [
        Drawing(
            Markup(pictures.svg(pictures.figure(preview), f"mask{i}")),
            f"Training image {i + 1}: {seen} of {patches} patches are seen, "
            f"{outlined} patches are to be predicted.",
        )
        for i, preview in enumerate(found)
    ]
    sizes = {"seen": seen, "patches": patches, "side": config.side, "blocks": blocks, "size": size}
    return {"figures": figures, "masks": build_sampler(config).describe(), **sizes}


def _similarity(config: Config | None, model: MaskedImageModel | None) -> dict[str, Any] | None:
    """The figure of positions, if they have noise that is the same for all images."""
    if not (config and model and similarity.same_for_all_images(model.predictor.positions)):
        return None
    found = similarity.of_model(model, config.seed)
    alt = (
        f"Similarity of {len(found.queries)} positions to all {config.side**2} fixed ones: "
        f"deterministic, one stochastic draw, and the mean of {found.draws} draws."
    )
    return {
        "figure": Drawing(Markup(pictures.svg(similarity.figure(found), "similarity")), alt),
        "found": f"{100 * float(found.found.mean()):.0f} %",
        "strength": f"{100 * found.strength:.0f} %",
        "draws": found.draws,
    }


def _start(start: dict[str, Any]) -> dict[str, str]:
    versions = _mapping(start.get("versions"))
    return _known(
        {
            "started": start.get("time"),
            "host": start.get("host"),
            "device": start.get("device"),
            "CPU threads": start.get("threads"),
            "command": " ".join(map(str, _sequence(start.get("command")))),
            "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
            "git": start.get("git"),
        }
    )
