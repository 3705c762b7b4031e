"""Advice about a run before it starts: the preset that is chosen, objections, alternatives.

`pretrain` without a preset, and `check`, make the same choice: see plan.py.
"""

import shlex
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from stopmim.base.console import is_first_rank, say, warn
from stopmim.base.errors import UserError
from stopmim.base.tables import spoken
from stopmim.config.presets import ENOUGH, known_preset
from stopmim.config.schema import Config
from stopmim.data.channels import Form
from stopmim.data.images import Images
from stopmim.data.pixels import RGB
from stopmim.data.sources.source import printable
from stopmim.data.workers import cores
from stopmim.train import cost
from stopmim.train.plan import (
    CANDIDATES,
    SMALL,
    Plan,
    as_options,
    choose,
    first_config,
    machine,
    plan_run,
)

LARGER = {"photos_s16": "photos_b16"}
FEW = 1000  # images
FEWEST = ENOUGH // 2  # updates to learn anything from
DETAIL = 224  # pixels: the usual size of ViTs, beyond which detail is never missed here
HOPELESS = 1e13  # operations per update; presets for one GPU have fewer, those of the paper more
RATE = 2e11  # operations per second that no core of a CPU exceeds
ALTERNATIVE = 4  # times as fast, or as long
WIDTH = 80


def settle(
    preset: str | Path | Config | None,
    changes: Mapping[str, Any],
    images: Images,
    device: torch.device,
    out: Path,
    ranks: int,
) -> Config:
    """The config of a run on `images`; prints the preset it chose, and warnings."""
    known, resumed = known_preset(preset), (out / "run.json").exists()
    slow = known and device.type == "cpu" and known.needs.hardware != "CPU"  # as `warnings` says
    first = first_config(preset, changes, out)
    is_new_choice = preset is None and not resumed
    if not (is_new_choice or (known and (known.scales or slow))):
        return first
    seen = Form(first.data.channels or RGB.channels, first.data.kind or RGB.kind)  # by then settled
    found = plan_run(preset, changes, cost.look(images, seen), device, out, ranks)
    if is_first_rank() and not resumed:
        if preset is None:
            say(f"preset {found.preset} for {found.where}: {found.lasts}")
        for text in warnings(found) if found.per_epoch else []:  # or an error follows
            warn(text)
    return found.config


# ------------------------------------------------------------------------------ objections


def refuse_hopeless(
    config: Config,
    preset: object,
    device: torch.device,
    data: object,
    out: Path,
    changes: Mapping[str, Any],
) -> None:
    """Raises UserError for a run on a CPU whose single updates would take minutes.

    Decided by the number of operations: a measurement would itself take minutes.
    """
    if device.type == "cpu" and (flops := _flops(config, device)) > HOPELESS:
        name = f"{preset} is" if isinstance(preset, str | Path) else "this config is"
        place = data if isinstance(data, str | Path) else "DATA"
        words = ["pretrain", str(place), "--preset", CANDIDATES["cpu"][0]]
        words += [*_kept_options(changes, device), "--out", str(out)]
        raise UserError(
            f"{name} made for GPUs: on {machine(device)} each of its updates would take more than "
            f"{spoken(flops / RATE / cores())}; use stopmim {shlex.join(words)}"
        )


def _flops(config: Config, device: torch.device) -> float:
    """Floating-point operations of an update."""
    return cost.work(config, device).flops * config.optim.batch_size


def _kept_options(changes: Mapping[str, Any], device: torch.device) -> list[str]:
    """The changes as options for the preset for CPUs, or none if it does not work with them."""
    changes = {key: value for key, value in changes.items() if key != "init"}  # of a larger network
    try:
        config = first_config(CANDIDATES["cpu"][0], changes)
    except UserError:
        return []
    return [] if _flops(config, device) > HOPELESS else as_options(changes)


def warnings(plan: Plan) -> list[str]:
    """Warnings about a planned run, one line each."""
    config, facts, on_cpu = plan.config, plan.facts, plan.device.type == "cpu"
    lines, size, suits = list[str](), config.image_size, choose(facts, plan.device)
    if not plan.per_epoch:
        return [f"{facts.count} images do not fill one batch of {config.optim.batch_size}"]
    known = known_preset(plan.preset)
    if on_cpu and known and known.needs.hardware != "CPU":
        lines.append(
            f"{plan.preset} is made for a GPU, and there is none: about {spoken(plan.seconds)} "
            f"here; --preset {suits} is for CPUs"
        )
    keeps_detail = config.data.crop_pixels is not None  # crops parts of images, hardly reduced
    if min(facts.side, DETAIL) >= 2 * size and not keeps_detail:
        finer = "photos_s16 on a GPU" if on_cpu else suits
        lines.append(
            f"images of {facts.side} px are reduced to {size} px, and fine detail is lost; "
            f"--preset {finer} keeps more"
        )
    if plan.updates < FEWEST:
        enough = -(-ENOUGH // plan.per_epoch)
        lines.append(
            f"{plan.updates:,} updates are too few to learn from; try --optim.epochs {enough}"
        )
    if not keeps_detail and facts.side > (8 if facts.count < 10 else 16) * DETAIL:
        lines.append(
            f"images of {facts.side:,} px: train on parts of them with --data.crops_per_image 1024 "
            f"--data.crop_pixels '[{size}, {4 * size}]'"
        )
        return lines
    reading = facts.reading(config) * config.optim.batch_size / max(1, facts.workers)
    if facts.side > 4 * DETAIL and reading > plan.seconds / plan.updates / 2:
        lines.append(
            f"reading images of {facts.side} px takes most of the time; copies are read many times "
            f"as fast: stopmim pack DATA --size {2 * DETAIL} --out PACKED"
        )
    if facts.count < FEW:
        better = (
            "features DATA --encoder FILE --out x.npz"
            if on_cpu
            else "pretrain DATA --preset continue_b16 --init FILE --out RUN"
        )
        few = "1 image is" if facts.count == 1 else f"{facts.count:,} images are"
        lines.append(
            f"{few} few to learn from: expect little over random init; a "
            f"public encoder may serve better (docs/encoders.md): stopmim {better}"
        )
    return lines


# ------------------------------------------------------------------------------ printing it


def recommend(data: str, plan: Plan, chosen: bool) -> str:
    """The plan as text: a command, why, how long; two alternatives if it was `chosen` here."""
    data = printable(data)
    lines = ["recommended" if chosen else "plan", f"  {plan.command(data)}"]
    lines += _wrapped(plan.what, plan.takes, f"for {plan.where}{_reason(plan)}" if chosen else "")
    for label, other in _alternatives(plan) if chosen and plan.updates else []:
        suffix = f"-{label.partition(',')[0]}"  # a directory of its own: configs differ
        lines += [label, f"  {other.command(data, suffix)}", *_wrapped(other.what, other.takes)]
    for text in warnings(plan):
        lines += textwrap.wrap(f"warning: {text}", WIDTH, subsequent_indent="  ")
    return "\n".join(lines)


def _reason(plan: Plan) -> str:
    """Reason why this preset was chosen, as the end of a sentence."""
    if plan.device.type == "cpu":
        return ": without a GPU, a small network on small crops"
    size = plan.config.image_size
    few = f"too small for more than {size} px" if size < SMALL else f"large enough for {size} px"
    return f": a GPU, and images {few}"


def _alternatives(plan: Plan) -> list[tuple[str, Plan]]:
    """A faster and a better run than the recommended one."""
    epochs = plan.config.optim.epochs
    fewest = -(-FEWEST // plan.per_epoch)  # epochs that `warnings` accepts
    found, shorter = list[tuple[str, Plan]](), max(fewest, epochs // ALTERNATIVE)
    if shorter < epochs:
        found.append(("faster, for a first look", _with(plan, {"optim.epochs": shorter})))
    if plan.preset in LARGER:
        larger = _with(replace(plan, preset=LARGER[plan.preset]), {})
        return [*found, ("better, a larger network", larger)]
    longer = _with(plan, {"optim.epochs": ALTERNATIVE * epochs})
    return [*found, ("better, if you have the time", longer)]


def _with(base: Plan, changes: Mapping[str, Any]) -> Plan:
    return plan_run(base.preset, {**base.changes, **changes}, base.facts, base.device)


def _wrapped(*texts: str) -> list[str]:
    indent = " " * 6
    return [
        line
        for text in texts
        for line in textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent)
    ]
