"""The README.md of an export: what it is, how it was trained, how it is loaded, what it can do."""

import shlex
from pathlib import Path
from typing import Any

from stopmim._version import __version__
from stopmim.config.schema import Config
from stopmim.method.encoder import EPS, VisionTransformer
from stopmim.runs.run import Run
from stopmim.weights.foreign import Branch
from stopmim.weights.inspect import Identity
from stopmim.weights.load import Shape

BRANCH = {
    "target": "the target (EMA) encoder, which the papers evaluate",
    "context": "the context encoder, the trained one",
}
CHOSEN = {"none": "-", "held-out": "train", "paper": "test"}  # as in the tables of evals


def card(about: Identity, encoder: VisionTransformer, to: str, branch: Branch) -> str:
    """The text, in Markdown with the front matter the hub expects."""
    size = encoder.side * encoder.patch
    which = BRANCH[branch] if about.branches else "its encoder"
    if to in ("ijepa", "mae"):
        which = "all that is in it"
    rows = "\n".join(f"| {name} | {value} |" for name, value in about.rows[1:-2])
    return f"""---
license: other
library_name: {"transformers" if to == "hf" else "timm" if to == "timm" else "stopmim"}
tags: [vision, self-supervised-learning, masked-image-modeling]
---

# {about.path.name or "encoder"}, exported for {NAMES[to]}

A Vision Transformer made by masked image modeling. Exported by stopmim {__version__} from
`{about.path}`: {which}.

| | |
|---|---|
{rows}

## Load it

{HOW[to](encoder)}
Images are RGB, {size}x{size} pixels, normalised with mean (0.485, 0.456, 0.406) and standard
deviation (0.229, 0.224, 0.225). The published evaluations resize the shorter side to
{round(size * 256 / 224)} (bicubic) and cut out the middle {size}.
{_pooling(encoder)}
{_training(about)}{_numbers(about, branch)}
## Licence

stopmim is MIT. Weights have the licence of whoever trained them, which depends on the data: say it
here and in the first lines of this file.
"""


NAMES = {
    "timm": "timm",
    "hf": "Hugging Face transformers",
    "onnx": "ONNX",
    "ijepa": "the code of I-JEPA and StoP",
    "mae": "the code of MAE",
    "safetensors": "stopmim and plain PyTorch",
}


def _python(code: str) -> str:
    return f"```python\n{code}\n```\n"


def timm_call(encoder: VisionTransformer, file: str = "model.safetensors") -> str:
    """The exact call. Every number is said: timm has a B/16 without class token of 16 heads."""
    options: dict[str, Any] = {
        "checkpoint_path": file,
        "num_classes": 0,
        "img_size": encoder.side * encoder.patch,
        "patch_size": encoder.patch,
        "embed_dim": encoder.width,
        "depth": len(encoder.blocks),
        "num_heads": encoder.heads,
        "mlp_ratio": Shape.of(encoder).hidden / encoder.width,
    }
    if not encoder.prefix:  # with fc_norm left out the final norm would move behind the pooling
        options |= {"class_token": False, "global_pool": "avg", "fc_norm": False}
    lines = [f"    {name}={value!r},".replace("'", '"') for name, value in options.items()]
    imports = "import timm\n"
    if encoder.norm.eps != EPS:
        imports = "from functools import partial\n\nimport timm\nfrom torch import nn\n"
        lines.append(f"    norm_layer=partial(nn.LayerNorm, eps={encoder.norm.eps!r}),")
    call = "\n".join(lines)
    return f'{imports}\nmodel = timm.create_model(\n    "vit_base_patch16_224",\n{call}\n).eval()'


def _timm(encoder: VisionTransformer) -> str:
    width = encoder.width
    call = timm_call(encoder)
    text = _python(f"{call}\nfeatures = model(images)  # (B, {width})")
    return text + (
        "\nThe name is only a template: every number that matters is given. Do not load the\n"
        "file into `vit_base_patch16_gap_224`, which has 16 heads and takes it without a word.\n"
    )


def _hf(encoder: VisionTransformer) -> str:
    option = ", add_pooling_layer=False" if encoder.prefix else ""
    which = "[:, 0]" if encoder.prefix else ".mean(dim=1)"
    return _python(
        "from transformers import AutoImageProcessor, AutoModel\n\n"
        'processor = AutoImageProcessor.from_pretrained("THIS_FOLDER")\n'
        f'model = AutoModel.from_pretrained("THIS_FOLDER"{option}).eval()\n'
        'inputs = processor(images=picture, return_tensors="pt")\n'
        f"features = model(**inputs).last_hidden_state{which}  # (B, {encoder.width})"
    ) + (
        "\n`last_hidden_state` has the final norm applied, `hidden_states` have not: apply\n"
        "`model.layernorm` to them before pooling. Other image sizes need\n"
        "`interpolate_pos_encoding=True`.\n"
    )


def _onnx(encoder: VisionTransformer) -> str:
    size, width = encoder.side * encoder.patch, encoder.width
    return _python(
        "import onnxruntime\n\n"
        'session = onnxruntime.InferenceSession("model.onnx")\n'
        'features, tokens = session.run(None, {"images": images})'
    ) + (
        f"\nimages are (B, 3, {size}, {size}) in float32 with any B, features (B, {width}),\n"
        f"tokens (B, {encoder.side**2}, {width}).\n"
        "Checked with onnxruntime against stopmim when it was written.\n"
    )


def _ijepa(encoder: VisionTransformer) -> str:
    return _python(
        "import torch\n\n"
        'file = torch.load("model.pth.tar", map_location="cpu", weights_only=True)\n'
        'weights = {k.removeprefix("module."): v for k, v in file["target_encoder"].items()}'
    ) + (
        "\nKeys are those of I-JEPA and StoP: `encoder`, `predictor` and `target_encoder`, each\n"
        "with the prefix `module.`, then `opt` and `scaler` (None: not to be resumed), `epoch`.\n"
        "`stopmim.predictor` says which predictor it is. Their code does not look at it:\n"
        "predictors of StoP and I-JEPA have the same keys and shapes, load into each other\n"
        "without an error, and give nonsense.\n"
        "timm reads `encoder`, the context encoder, from such a file.\n"
    )


def _mae(encoder: VisionTransformer) -> str:
    return _python(
        "from safetensors.torch import load_file\n\n"
        'weights = load_file("model.safetensors")  # for MaskedAutoencoderViT.load_state_dict'
    ) + (
        "\nKeys are those of MAE's code, its `model`: the encoder under timm's names, then\n"
        "`mask_token` and `decoder_...`. The header says how many heads the decoder has and\n"
        "whether its pixels are normed, `stopmim.predictor`; with StoP in training the masked\n"
        "tokens are those of MAE as soon as there is no noise.\n"
    )


def _safetensors(encoder: VisionTransformer) -> str:
    return (
        _python(
            "import stopmim\n\n"
            'encoder = stopmim.load_encoder("model.safetensors")\n'
            f"features = encoder.features(images)  # (B, {encoder.width})"
        )
        + "\nWithout stopmim, `safetensors.torch.load_file` gives its state dict. Names are\n"
        "timm's, I-JEPA's, MAE's and DINO's; heads and epsilon are in the header.\n"
    )


HOW = {
    "timm": _timm,
    "hf": _hf,
    "onnx": _onnx,
    "ijepa": _ijepa,
    "mae": _mae,
    "safetensors": _safetensors,
}


def _pooling(encoder: VisionTransformer) -> str:
    if encoder.prefix:
        return "The feature of an image is its class token after the final norm."
    return "The feature of an image is the mean of its tokens after the final norm."


def _training(about: Identity) -> str:
    if about.config is None:
        return ""
    c = about.config
    return f"""
## Training

{c.arch}, images of {c.image_size} pixels, {c.positions.kind} positions, {c.masking.kind} masks;
step {about.step} of {c.optim.epochs} epochs with batch {c.optim.batch_size}, learning rate
{c.optim.lr:g}, {_target(c)}, seed {c.seed}.{_data(about.path)}
"""


def _target(config: Config) -> str:
    if config.target == "pixels":
        return f"{'normed ' if config.norm_pixels else ''}pixels predicted"
    return f"EMA {config.optim.ema[0]:g} to {config.optim.ema[1]:g}"


def _run(path: Path) -> Run | None:
    """The run that `path` is, or is a checkpoint of."""
    for folder in (path, path.resolve().parent.parent):
        if (folder / "run.json").is_file():
            return Run(folder)
    return None


def _data(path: Path) -> str:
    run = _run(path)
    data = run.about.get("data", {}) if run else {}
    return f" Data: {data['images']} images from `{data['source']}`." if "source" in data else ""


def _numbers(about: Identity, branch: Branch) -> str:
    """What results.jsonl says of these very weights, or how to have it say something."""
    run = _run(about.path)
    if run is None or about.step is None:
        return ""
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    final = _final(run, about)
    for line in run.results:
        if _measured(line, about, branch, final):
            cells = _cells(line)
            # The newest of those that would read the same.
            rows[tuple(cells.values())] = cells | _values(line)
    if not rows:
        words = ["stopmim", "eval", "suite", str(about.path)]
        words += ["--branch", branch] if branch == "context" and about.branches else []
        words += [] if about.path == run.path else ["--out", str(run.path)]
        return (
            "\n## Results\n\nThese weights have not been evaluated yet. Do it, and export again:\n"
            f"\n```sh\n{shlex.join(words)}\n```\n"
        )
    which = f"the {branch} encoder" if about.branches else "the encoder"
    return f"""
## Results

Of {which} at step {about.step}. *Labels*: how many labelled images there were to fit to. *Chosen
on*: the part of the data that settings were chosen on; a number chosen on test is too high. *Random
init*: the same network before training.

{_table(list(rows.values()))}
"""


def _final(run: Run, about: Identity) -> bool:
    """Whether it is the run's last checkpoint: no other can be newer, and none will be."""
    metrics, config = run.metrics, about.config
    if not metrics or config is None or metrics[-1].get("step") != about.step:
        return False
    return metrics[-1].get("epoch", 0) >= config.optim.epochs


def _measured(line: dict[str, Any], about: Identity, branch: Branch, final: bool) -> bool:
    """Whether `line` is of the weights that `about` and `branch` name."""
    if not {"protocol", "name", "value"} <= line.keys() or not isinstance(line["value"], float):
        return False
    if "A" in line:  # of two encoders, by ``eval compare``
        return False
    if about.branches and line.get("branch", "target") != branch:
        return False
    # Before it was noted, a line was of whatever was newest; null is of no run of ours.
    return line["step"] == about.step if "step" in line else final


def _cells(line: dict[str, Any]) -> dict[str, str]:
    """All that tells one evaluation from another."""
    chosen = line.get("selection")
    cells = {
        "protocol": f"{line['protocol']} {line.get('label', '')}".strip(),
        "quantity": line["name"],
        "data": line.get("videos" if line["protocol"] == "tracking" else "test_data"),
        "fitted on": line.get("train_data"),
        "labels": line.get("train"),
        "chosen on": CHOSEN.get(str(chosen), chosen),
        "setting": line.get("setting"),
        "size": line.get("size"),
        "seed": line.get("seed"),
    }
    return {name: "" if value is None else str(value) for name, value in cells.items()}


def _values(line: dict[str, Any]) -> dict[str, str]:
    names = {"value": "value", "random init": "random_init"}
    found = {name: line.get(key) for name, key in names.items()}
    return {name: f"{x:.4f}" if isinstance(x, float) else "" for name, x in found.items()}


def _table(rows: list[dict[str, str]]) -> str:
    """In Markdown, without empty columns, and training data and seed only where they differ."""
    said = {name: {row[name] for row in rows} for name in rows[0]}
    idle = {name for name, values in said.items() if values == {""}}
    idle |= {name for name in ("fitted on", "seed") if len(said[name] - {""}) == 1}
    names = [name for name in rows[0] if name not in idle]
    lines = [names, ["---"] * len(names)]
    lines += [[row[name].replace("|", "\\|") for name in names] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
