"""Configs of random, extreme, absurd and mistyped values: an answer in seconds, a finite model."""

import random
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from safetensors.torch import load_file

from campaign.cases import Case, Family, need
from campaign.processes import GIB, Limits
from campaign.sample import USUAL, stop_at, words, write_images
from stopmim.config.schema import Config, flatten, type_of
from stopmim.runs.checkpoint import newest_intact
from tiny import tiny

UPDATES = 2
LIMITS = Limits(seconds=40, memory=4 * GIB, space=6 * GIB)
KEYS = [key for key, _ in flatten(Config().model_dump(mode="json"))]

# Values that can train within seconds, where the type alone does not say so. Large but possible
# ones (hours on this machine) are left out; absurd ones are in NUMBERS.
GOOD: dict[str, tuple[Any, ...]] = {
    "arch": ("vit_micro4", "vit_micro8", "vit_micro2", "vit_micro12", "vit_micro1"),
    "image_size": (12, 16, 24, 32, 36),
    "init": (None,),
    "seed": (0, 1, 2**31, 2**63, 2**64, 10**30),
    "data.skip": (None,),
    "masking.targets": (1, 2, 4, 8),
    "masking.context_length": (None, 1, 5, 10, 36, 0.28, 0.5, 1.0),
    "predictor.width": (4, 12, 24, 48, 96),
    "predictor.depth": (None, 1, 2),
    "predictor.heads": (None, 1, 2, 3, 4, 6),
    "optim.epochs": (1, 2, 10, 10**6),
    "optim.batch_size": (1, 2, 7, 8, 16, 40),
    "optim.lr": (1e-30, 1e-6, 1e-3, 0.1, 1.0, 1e3, 1e10, 1e30, 1e39, 1e300),
    "optim.warmup_epochs": (0, 0.0, 0.5, 1.0, 2),
    "runtime.device": ("auto", "cpu"),
    "runtime.compile": ("auto", "off"),
    "runtime.precision": ("auto", "fp32", "bf16", "fp16"),
    "runtime.accumulate": (1, 2, 4, 8),
    "runtime.workers": (None, 0, 1, 2),
    "runtime.worker_timeout": (0, 5, 300, 10**6),
    "runtime.threads": (None, 1, 2),
    "runtime.log_every": (1, 2, 10**9),
    "runtime.health_every": (None, 0, 1, 2),
    "runtime.save_every": (None, 1, 2, 10**12),
    "runtime.keep": (2, 3, 10**9),
    "runtime.mirror": ("none",),
}
NUMBERS: tuple[float, ...] = (
    *(0, 1, -1, 2, 3, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30),
    *(0.0, -0.0, 1.0, 1 - 1e-16, 1 + 1e-9, 1e-320, 1e-45, 1e-8, 0.5, 1e8, 1e38, 1e39, 1e300),
    *(100_000, 1_000_000, -1e300, float("nan"), float("inf"), float("-inf")),
)
OTHERS: tuple[Any, ...] = (
    *(None, True, False, "", "x", "1e-4", "0.5", "auto", "no", "~", "null", "a\nb", "\x1b[31m"),
    *(
        "é" * 300,
        "/dev/zero",
        "../..",
        "vit_micro0",
        "vit_b-1",
        "vit_micro99999999999",
        "vit_",
        "4",
    ),
    *("vit_g1", "vit_micro٣", "x.jsonl", "/dev/zero.jsonl", "/", ".", "list:/dev/zero", "9" * 5000),
    *([], [0], [1, 2, 3], [0.1, 0.2], [1.0, 1.0], [0, 0], [1, 0.5], [[1], [2]], {}, {"a": 1}),
    *([0.0, 1e-300], [1e-9, 1e9], [float("nan"), 1.0], [1.0, float("inf")], ["a", "b"]),
)


def good(key: str, dice: random.Random) -> Any:
    """A value that the key admits."""
    if key in GOOD:
        return dice.choice(GOOD[key])
    kind = type_of(key)
    options = [value for one in _alternatives(kind) for value in _examples(one, dice)]
    return dice.choice(options)


def _alternatives(kind: Any) -> list[Any]:
    """The types of a union, each without its annotations."""
    if hasattr(kind, "__metadata__"):
        return _alternatives(kind.__origin__)
    if get_origin(kind) is tuple or not get_args(kind) or get_args(kind)[0] in _literals(kind):
        return [kind]
    return [one for part in get_args(kind) for one in _alternatives(part)]


def _literals(kind: Any) -> list[Any]:
    return [value for value in get_args(kind) if isinstance(value, str)]


def _examples(kind: Any, dice: random.Random) -> list[Any]:
    if kind is type(None):
        return [None]
    if kind is bool:
        return [True, False]
    if literals := _literals(kind):
        return literals
    if get_origin(kind) is tuple:
        return [sorted((dice.random(), dice.random())), [1.0, 1.0], [1e-3, 1e-3], [0.9, 0.999]]
    return [0.01, 0.5, 1.0, 10 ** dice.uniform(-8, 8)] if kind is float else [1, 2, 3]


def bad(key: str, dice: random.Random) -> Any:
    """A value that the key may well refuse."""
    value = dice.choice(dice.choice((NUMBERS, OTHERS)))
    if get_origin(type_of(key)) is tuple and dice.random() < 0.6:
        return [dice.choice(NUMBERS), dice.choice(NUMBERS)]
    return value


def draw(case: Case) -> dict[str, Any]:
    """Changes of a few keys; every other case has bad values among them."""
    dice = case.dice
    keys = dice.sample(KEYS, dice.choice((1, 1, 2, 3, 5, 8)))
    changes = {key: good(key, dice) for key in keys}
    if case.number % 2:
        for key in keys[: dice.choice((1, 1, 2))]:
            changes[key] = bad(key, dice)
        if dice.random() < 0.05:
            changes[dice.choice(("new", "optim.new", "optim", "a\nb", "data.crop_scale.x"))] = 1
    return changes


def case(case: Case) -> None:
    changes = draw(case)
    case.about = str(changes)[:300]
    images, out = case.shared / "images", case.folder / "run"
    config = case.folder / "config.yaml"
    tree = tiny(**USUAL).model_dump(mode="json")
    options: list[str] = []
    if case.dice.random() < 0.3:  # on the command line
        for key, value in changes.items():
            text = (
                value if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True)
            )
            options += [f"--{key}={text.removesuffix('...' + chr(10)).strip()}"]
    else:
        for key, value in changes.items():
            _set(tree, key, value)
    config.write_text(yaml.safe_dump(tree), encoding="utf-8")
    line = [*words(images, out, config), *options]
    done = case.run(*line, limits=LIMITS, before=lambda: stop_at(UPDATES))
    need(done.code not in (8, 9, 130, 143), str(done))
    if done.code == 0:
        case.counts["trained"] += 1
        for name in ("model", "optimizer"):
            for key, x in load_file(newest_intact(out) / f"{name}.safetensors").items():
                need(bool(x.isfinite().all()), f"code 0, and {name} has {key} not finite")


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        node = tree.get(section)
        if not isinstance(node, dict):
            tree[section] = node = {}
        tree = node
    tree[name] = value


def prepare(folder: Path) -> None:
    write_images(folder / "images")


FAMILY = Family(
    "configs",
    "a config is refused in one line, or trains a finite model",
    quick=300,
    long=5000,
    case=case,
    prepare=prepare,
)
