"""Data for the script of the page, as JSON: curves, neighbours, predictions and positions.

Maps are bytes, 0 to 255, in base64: a thousand of them take less room than one photograph.
"""

import base64
import contextlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from stopmim.base.errors import CheckpointError
from stopmim.config.schema import Config
from stopmim.health.log import Logged
from stopmim.insight.figures import curves, prediction
from stopmim.insight.figures.layout import layout
from stopmim.insight.figures.neighbours import Neighbours, kinds, queries
from stopmim.insight.figures.pictures import Preview, resized
from stopmim.insight.figures.similarity import DRAWS, of_model
from stopmim.method.build import build
from stopmim.method.model import MaskedImageModel
from stopmim.runs import checkpoint
from stopmim.runs.run import Run
from stopmim.weights.load import load_model

SCRIPT = Path(__file__).with_name("page.js").read_text(encoding="ascii")
EDGE = 240  # pixels of an image of the explorer
THUMBNAIL = 96  # most pixels along an edge of an image of the gallery: 300 of them take 1 MB
MAPS = 6_000_000  # bytes of heat maps in a page; beyond that, fewer images are shown


def packed(maps: np.ndarray) -> str:
    """Values from 0 to 1, as bytes in base64."""
    return base64.b64encode((255 * maps).round().clip(0, 255).astype(np.uint8).tobytes()).decode()


def as_json(tree: Any) -> str:
    """JSON for the inside of a ``<script>``: nothing in it can end the element."""
    text = json.dumps(tree, allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def charts(runs: Sequence[Run], reference: Sequence[Logged]) -> list[dict[str, Any]]:
    """The curves of several runs, panel by panel; the first run is the subject of the page.

    The curves of the `reference` come last, in the colours of the subject.
    """
    named = [(i, run.path.resolve().name, run.metrics) for i, run in enumerate(runs)]
    drawn = [*named, *([(-1, "reference", reference)] if reference else [])]
    shown = []
    for panel in curves.PANELS:
        found = [
            {"run": number, "name": name, "label": label, "series": colour}
            | {k: [float(f"{v:.5g}") for v in values] for k, values in c._asdict().items()}
            for number, name, lines in drawn
            for colour, (key, label) in enumerate(panel.series.items())
            if len((c := curves.curve(lines, key, low=panel.low)).step)
        ]
        if any(line["run"] == 0 for line in found):
            shown.append({"title": panel.title, "lines": found})
    return shown


def neighbours(found: Neighbours) -> dict[str, Any]:
    """Small pictures of some images, their places on a map, and their neighbours."""
    shown = found.pictures
    return {
        "pictures": [_jpeg(image) for image in shown],
        "names": [found.images.name(i) for i in range(len(shown))],
        "queries": queries(len(shown)).tolist(),
        "encoders": [
            {
                "name": encoder.name,
                "nearest": encoder.nearest.tolist(),
                "places": layout(encoder.features).round(4).tolist(),
            }
            for encoder in found.encoders
        ],
        "kinds": [
            {"label": kind.label, "names": kind.names, "of": kind.of.tolist()}
            for kind in kinds(found.images)
        ],
    }


def predictions(run: Run, config: Config, views: list[Preview]) -> dict[str, Any] | None:
    """Heat maps of every hidden patch of every image, untrained and for every checkpoint."""
    models = [("untrained", build(config).eval())]
    for path in checkpoint.steps(run.path):
        with contextlib.suppress(CheckpointError):  # damaged, or removed by a run that trains
            models.append((f"step {path.name[5:].lstrip('0') or 0}", load_model(path)))
    if len(models) < 2:
        return None
    side, hidden = config.side, views[0].targets.size
    views = views[: max(1, MAPS // (len(models) * hidden * side**2 * 4 // 3 + 1))]
    cosines = [prediction.predict(model, views, config) for _, model in models]
    return {
        "side": side,
        "steps": [name for name, _ in models],
        "images": [
            {
                "picture": _png(view.picture),
                "context": view.context.tolist(),
                "patches": view.targets.ravel().tolist(),
                "blocks": len(view.targets),
                "maps": [packed(prediction.heat(cosine[i])) for cosine in cosines],
            }
            for i, view in enumerate(views)
        ],
    }


def positions(model: MaskedImageModel, seed: int) -> dict[str, Any]:
    """Similarity of every position to every other: without noise, one draw, mean over draws."""
    side = model.predictor.positions.side
    found = of_model(model, seed, torch.arange(side**2))
    low, high = float(found.maps.min()), float(found.maps.max())
    scaled = (found.maps - low) / max(1e-9, high - low)  # (side * side, 3, side, side)
    return {
        "side": side,
        "titles": ["without noise", "one draw", f"mean of {DRAWS} draws"],
        "low": round(low, 3),
        "high": round(high, 3),
        "maps": [packed(scaled[:, kind]) for kind in range(3)],
    }


def _png(image: np.ndarray) -> str:
    edge = EDGE // len(image) * len(image) or EDGE  # whole pixels if it is enlarged
    return _address(resized(image, edge), "png", optimize=True)


def _jpeg(image: np.ndarray) -> str:
    return _address(resized(image, min(THUMBNAIL, len(image))), "jpeg", quality=80)


def _address(picture: Image.Image, kind: str, **options: Any) -> str:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"
