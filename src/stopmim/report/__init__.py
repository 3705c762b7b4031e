"""`report.html` of a run: one file to open, print or send, that loads nothing and runs nothing.

Formats only; what it shows is computed in `analysis`. Everything in a run directory but the figures
is taken for hostile text: it reaches the page through the template alone, which escapes it.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from stopmim._version import __version__
from stopmim.analysis import curves, pictures, similarity
from stopmim.analysis.curves import number
from stopmim.config import Config, flatten, to_yaml
from stopmim.data import Images, open_images
from stopmim.data.skip import without_skipped
from stopmim.errors import UserError
from stopmim.keys import torch_generator
from stopmim.mim import MaskedImageModel
from stopmim.positions import StochasticPositions
from stopmim.run import Run, write_whole

T = TypeVar("T")

PREVIEWS = 8  # images shown with their masks
DRAWS = 64  # of a stochastic position

# Keys of a result that have a column of their own.
_COLUMNS = ("name", "protocol", "label", "value", "low", "high", "random_init", "n", "selection")


class Shown(NamedTuple):
    """A figure of the page."""

    svg: Markup
    alt: str


class Result(NamedTuple):
    """A line of the evaluation table, as text; "" is what the line does not say."""

    protocol: str
    label: str
    selection: str
    n: str
    value: str
    exact: str  # the value as it was recorded
    interval: str
    random_init: str
    difference: str
    verdict: str  # "up" or "down" if the interval excludes random init
    details: str
    bar: dict[str, str] | None  # positions in percent; None unless the value is a share


def write(run: Run, images: Images | None = None) -> Path:
    """Writes `report.html` of `run` from whatever is there, and returns its path.

    Without `images`, those that run.json names are opened again; either way they are shown only if
    they are the ones the run began with.
    """
    about, metrics, results = _mapping(run.about), run.metrics, run.results
    config, config_missing = _attempt(lambda: _config(run, about))
    previews, previews_missing = _attempt(lambda: _previews(about, config, images))
    model, model_missing = _attempt(run.model)
    page = _environment().get_template("page.html")
    text = page.render(
        name=run.path.resolve().name,
        path=run.path.resolve(),
        version=__version__,
        summary=_summary(about, config, metrics),
        best=_best(results),
        results=[_result(line) for line in results],
        panels=_panels(metrics),
        previews=previews,
        previews_missing=previews_missing,
        similarity=_similarity(config, model),
        model_missing=model_missing,
        config_lines=_config_lines(about, config),
        config_missing=config_missing,
        starts=[_start(_mapping(start)) for start in _sequence(about.get("starts"))],
    )
    path = run.path / "report.html"
    write_whole(path, text)
    return path


def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(Path(__file__).parent),
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
        "images": _count(data.get("images")),
        "step": _count(last.get("step")),
        "epoch": _count(last.get("epoch")),
        "device": starts[-1].get("device") if starts else None,
    }
    if config is not None:
        seconds = curves.training_seconds(metrics, config.optim.batch_size)
        facts |= {
            "arch": config.arch,
            "method": _METHODS[config.positions.kind],
            "sigma": None if config.positions.sigma is None else f"{config.positions.sigma:g}",
            "pixels": str(config.image_size),
            "epochs": _count(config.optim.epochs),
            "time": _time(seconds) if seconds else None,
        }
    return {key: str(value) for key, value in facts.items() if value not in (None, "")}


_METHODS = {
    "stochastic": "I-JEPA + StoP",
    "sincos": "I-JEPA",
    "learned": "I-JEPA with learned positions",
}


def _panels(metrics: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The curves that have a value; empty before the first logged step."""
    shown: list[dict[str, Any]] = []
    for panel in curves.PANELS:
        drawn = {label: curves.curve(metrics, key) for key, label in panel.series}
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


def _previews(
    about: dict[str, Any], config: Config | None, images: Images | None
) -> dict[str, Any]:
    data = _mapping(about.get("data"))
    if config is None:
        raise UserError("the masks are drawn from the config, which cannot be read")
    if images is None:
        if not (source := _said(data, "source")):
            raise UserError("run.json does not say where they are")
        images = open_images(source)
    images = without_skipped(images, config.data.skip)
    if images.fingerprint != data.get("fingerprint"):
        raise UserError("the images found now are not those that the run began with")
    found = pictures.previews(images, config, step=0, count=PREVIEWS)
    if not found:
        raise UserError("none of the first images can be read")
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
    """The figure, for a model with stochastic positions."""
    if config is None or model is None:
        return None
    positions, project = model.predictor.positions, model.predictor.noise_layer
    if not isinstance(positions, StochasticPositions):
        return None
    queries = similarity.spread_queries(positions.side)
    generator = torch_generator("report", config.seed)
    found = similarity.similarity(positions, project, queries, DRAWS, generator)
    alt = (
        f"Similarity of {len(queries)} positions to all {positions.side**2} fixed ones: "
        f"deterministic, one stochastic draw, and the mean of {DRAWS} draws."
    )
    svg = Markup(pictures.svg(similarity.figure(found), "similarity"))
    return {
        "figure": Shown(svg, alt),
        "found": f"{100 * float(found.found.mean()):.0f} %",
        "strength": f"{100 * found.strength:.0f} %",
        "draws": DRAWS,
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


# ------------------------------------------------------------------------------ results


def _result(line: Mapping[str, Any]) -> Result:
    value, random_init = number(line.get("value")), number(line.get("random_init"))
    low, high = number(line.get("low")), number(line.get("high"))
    given = [x for x in (value, random_init, low, high) if x is not None]
    # Accuracies, Jaccard indices and the like are shares; RankMe, say, is a plain number.
    share = value is not None and all(0 <= x <= 1 for x in given)

    def text(x: float | None) -> str:
        return "" if x is None else f"{100 * x:.1f} %" if share else f"{x:.4g}"

    interval = difference = verdict = ""
    if low is not None and high is not None:
        interval = f"{100 * low:.1f} to {100 * high:.1f}" if share else f"{low:.4g} to {high:.4g}"
    if value is not None and random_init is not None:
        gain = value - random_init
        difference = f"{100 * gain:+.1f}" if share else f"{gain:+.4g}"
        if low is not None and high is not None:
            verdict = "up" if low > random_init else "down" if high < random_init else ""
    bar = None
    if share and value is not None:
        bar = {"value": f"{100 * value:.2f}"}
        if low is not None and high is not None:
            bar |= {"low": f"{100 * low:.2f}", "wide": f"{100 * max(0.0, high - low):.2f}"}
        if random_init is not None:
            bar |= {"random": f"{100 * random_init:.2f}"}
    return Result(
        protocol=_said(line, "protocol"),
        label=_said(line, "label"),
        selection=_said(line, "selection"),
        n=_count(line.get("n")) or _said(line, "n"),
        value=text(value) or _said(line, "value"),
        exact=_said(line, "value"),
        interval=interval,
        random_init=text(random_init),
        difference=difference,
        verdict=verdict,
        details=", ".join(f"{key} {line[key]}" for key in line if key not in _COLUMNS),
        bar=bar,
    )


def _best(results: Sequence[Mapping[str, Any]]) -> Result | None:
    """The result furthest above random init; one chosen on the test split only if need be."""
    compared = [
        line for line in results if (shown := _result(line)).bar is not None and shown.difference
    ]
    compared.sort(key=lambda line: line["value"] - line["random_init"], reverse=True)
    compared.sort(key=lambda line: line.get("selection") == "paper")
    return _result(compared[0]) if compared else None


def _said(line: Mapping[str, Any], key: str) -> str:
    value = line.get(key)
    return "" if value is None else str(value)


def _count(value: object) -> str:
    """1024 as "1,024", 2.5 as "2.5", and what is no number as ""."""
    x = number(value)
    return "" if x is None else f"{x:,.0f}" if x == int(x) else f"{x:,.1f}"


def _time(seconds: float) -> str:
    for unit, length in (("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:.0f} seconds"
