"""What the page lets a reader ask: numbers for its script, as JSON.

Maps are bytes, 0 to 255, in base64: a thousand of them take less room than one photograph.

Shapes: N = side * side patches.
"""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from stopmim.base.random_keys import torch_generator
from stopmim.config.schema import Config
from stopmim.insight.figures import curves, prediction
from stopmim.insight.figures.pictures import Preview
from stopmim.insight.figures.similarity import DRAWS, similarity
from stopmim.insight.figures.subject import Subject
from stopmim.method.build import build
from stopmim.method.model import MaskedImageModel
from stopmim.runs import checkpoint
from stopmim.runs.run import Run
from stopmim.weights.load import load_model

EDGE = 240  # pixels of an image of the explorer
MAPS = 6_000_000  # bytes of heat maps in a page; fewer images are shown rather than more bytes


def packed(maps: np.ndarray) -> str:
    """Values from 0 to 1, as bytes in base64."""
    return base64.b64encode((255 * maps).round().clip(0, 255).astype(np.uint8).tobytes()).decode()


def as_json(tree: Any) -> str:
    """JSON for the inside of a ``<script>``: nothing in it can end the element."""
    text = json.dumps(tree, allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def charts(
    runs: list[tuple[str, list[dict[str, Any]]]], reference: list[dict[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """The curves of several runs, panel by panel; the first run is the subject of the page.

    Those of the `reference` come last, in the colours of the subject.
    """
    drawn = [(number, name, rows) for number, (name, rows) in enumerate(runs)]
    drawn += [(-1, "reference", reference)] if reference else []
    shown = []
    for panel in curves.PANELS:
        lines = []
        for number, name, rows in drawn:
            for colour, (key, label) in enumerate(panel.series):
                c = curves.curve(rows, key, low=panel.low)
                if len(c.step):
                    line = {"run": number, "name": name, "label": label, "series": colour}
                    lines.append(line | {k: _short(v) for k, v in c._asdict().items()})
        if any(line["run"] == 0 for line in lines):
            shown.append({"title": panel.title, "lines": lines})
    return shown


def _short(values: np.ndarray) -> list[float]:
    return [float(f"{v:.5g}") for v in values]


def models(run: Run, config: Config) -> list[tuple[str, MaskedImageModel]]:
    """The untrained network, and every checkpoint of the run that verifies, oldest first."""
    found = [("untrained", build(config).eval())]
    for path in sorted((run.path / "checkpoints").glob("step-????????")):
        if checkpoint.verify(path) is None:
            found.append((f"step {int(path.name[5:])}", load_model(path)))
    return found


def predictions(run: Run, config: Config, views: list[Preview]) -> dict[str, Any] | None:
    """Heat maps of every hidden patch of every image, for every checkpoint."""
    known = models(run, config)
    if len(known) < 2:
        return None
    side, blocks = config.side, views[0].targets.size
    views = views[: max(1, MAPS // (len(known) * blocks * side**2 * 4 // 3 + 1))]
    found = [prediction.predict(Subject(name, config, model, views)) for name, model in known]
    return {
        "side": side,
        "steps": [one.name for one in found],
        "images": [
            {
                "picture": _png(view.image),
                "context": view.context.tolist(),
                "patches": found[0].patches[i].tolist(),
                "blocks": len(view.targets),
                "maps": [packed(prediction.heat(one.cosine[i])) for one in found],
            }
            for i, view in enumerate(views)
        ],
    }


def positions(model: MaskedImageModel, seed: int) -> dict[str, Any] | None:
    """Similarity of every position to every other, certain, drawn once, and over draws."""
    table = model.predictor.positions
    if not table.uncertain or table.conditioned:
        return None
    every = torch.arange(table.side**2)
    generator = torch_generator("report", seed)
    found = similarity(table, model.predictor.noise_layer, every, DRAWS, generator)
    low, high = float(found.maps.min()), float(found.maps.max())
    scaled = (found.maps - low) / max(1e-9, high - low)  # (N, 3, side, side)
    return {
        "side": table.side,
        "titles": ["certain", "one draw", f"mean of {DRAWS} draws"],
        "low": round(low, 3),
        "high": round(high, 3),
        "maps": [packed(scaled[:, kind]) for kind in range(3)],
    }


def _png(image: np.ndarray) -> str:
    how = Image.Resampling.NEAREST if len(image) <= EDGE else Image.Resampling.BOX
    times = max(1, EDGE // len(image))
    edge = times * len(image) if len(image) <= EDGE else EDGE
    file = io.BytesIO()
    Image.fromarray(image).resize((edge, edge), how).save(file, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def script() -> str:
    return (Path(__file__).parent / "page.js").read_text(encoding="ascii")
