"""Hostile weights, data, videos and texts, as they are and mutated, through every command.

The first cases are those of tests/hostile_files.py with each of the commands that read them, in a
random order; the others are mutants of these and of honest files.
"""

import dataclasses
import os
import random
import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import numpy as np

import hostile_data
import hostile_files
import hostile_runs
import hostile_weights
from campaign.cases import Case, Family, need
from campaign.damage import BYTES
from campaign.processes import GIB, Limits
from hostile_files import Hostile
from tiny import NoiseImages, write_folder

# By the clock others may slow it down; the time of the processor is compared afterwards.
SECONDS = hostile_files.BUSY * hostile_files.SECONDS
LIMITS = Limits(SECONDS, hostile_files.MEMORY, space=8 * GIB)
LARGE = 30_000_000  # bytes of a file that is not mutated
# Right answers to a mutant besides those to its kind: what it says may be fine, weights of any size
# may overflow, and a run without lines of a log has nothing to show.
HARMLESS = {
    "preset": {0, 2, 3, 4},
    "table": {0, 2, 3, 4},
    "weights": {0, 6},
    "run": {0, 2, 6},
}


@cache
def pairs() -> list[tuple[Hostile, str, bool]]:
    """Every hostile file with every command that reads it, and whether it is the first of these."""
    found = [
        (one, name, i == 0)
        for one in hostile_files.every()
        for i, name in enumerate(hostile_files.COMMANDS[one.kind])
    ]
    random.Random(0).shuffle(found)
    return found


def honest(shared: Path) -> dict[str, dict[str, Callable[[Path], object]]]:
    """Kind to name to a function that writes a file that commands accept."""
    state = hostile_weights.good()
    members = [(f"{i}.png", content) for i, content in enumerate(hostile_data.small())]
    images = NoiseImages(24).images
    labels = np.arange(24) % 3
    table = "rows:\n  a: {optim.lr: 1e-3}\n  b: {positions.sigma: 0.1}\nbaseline: a\n"
    return {
        "weights": {
            "good.safetensors": partial(shutil.copyfile, shared / hostile_files.FINE),
            "good.pth": lambda path: path.write_bytes(hostile_weights.torch_bytes(state)),
            "good.pth.tar": lambda path: path.write_bytes(
                hostile_weights.torch_bytes(hostile_weights.stop())
            ),
        },
        "run": {"good run": partial(shutil.copytree, shared / hostile_files.RUN)},
        "data": {
            "good images": lambda path: write_folder(path, 24),
            "good.tar": lambda path: path.write_bytes(hostile_data.shard(*members)),
            "good.npz": lambda path: np.savez(path, images=images, labels=labels),
            "good.parquet": lambda path: path.write_bytes(_parquet(images)),
        },
        "preset": {"good.yaml": partial(shutil.copyfile, shared / hostile_files.PRESET)},
        "table": {"good table.yaml": lambda path: path.write_text(table)},
    }


def _parquet(images: np.ndarray) -> bytes:
    import pyarrow

    cells = [{"bytes": hostile_data.encoded(x, "PNG"), "path": ""} for x in images]
    return hostile_data.parquet(lambda arrow: pyarrow.table({"image": cells}))()


def prepare(folder: Path) -> None:
    hostile_files.prepare(folder)


def case(case: Case) -> None:
    hostile_runs.__dict__["finished"] = lambda: case.shared / hostile_files.RUN  # made once
    shutil.copyfile(case.shared / hostile_files.FINE, hostile_files.FINE)
    shutil.copyfile(case.shared / hostile_files.PRESET, hostile_files.PRESET)
    shutil.copytree(case.shared / hostile_files.DATA, hostile_files.DATA, copy_function=os.link)
    if case.number < len(pairs()):
        one, name, is_first = pairs()[case.number]
        path = one.at(case.folder)
        case.counts["files"] += is_first
        case.about = one.name[:80]
    else:
        one = mutant(case)
        names = list(hostile_files.COMMANDS[one.kind])
        if one.kind == "preset":  # a preset of nothing is a ViT-B, which others would measure
            names = ["dry run"]
        path, name = one.name, case.dice.choice(names)
        case.counts["files"] += 1
    perform(case, one, one.commands(path)[name])


def perform(case: Case, one: Hostile, words: list[str]) -> None:
    done = case.start(*words, limits=LIMITS).finish()
    case.about += f"; {' '.join(words)[:150]}"
    need(not (case.folder / hostile_files.CANARY).exists(), f"code was executed: {done}")
    need(not done.beyond, f"took more than {done.beyond}: {done}")
    need(not done.left, f"left behind {', '.join(done.left)[:300]}: {done}")
    answer = hostile_files.Answer(
        words, done.code, done.printed, done.said, done.seconds, done.memory, False, done.cpu
    )
    found = hostile_files.problems(one, answer)
    need(not found, f"{', '.join(found)}: {done}")
    for line in done.said.splitlines():
        need(line.isprintable(), f"control characters: {line[:200]!r}")
    case.counts[f"exit {done.code}"] += 1


def mutant(case: Case) -> Hostile:
    """Writes a hostile or an honest file with some of its bytes changed."""
    dice = case.dice
    if dice.random() < 0.6:
        kind, written = dice.choice(list(honest(case.shared).items()))
        name, write = dice.choice(list(written.items()))
        one = Hostile(name, write, kind, frozenset(hostile_files.CODES[kind]))
    else:
        one = dice.choice(hostile_files.every())
    path = case.folder / one.at(case.folder)
    files = [path] if os.path.isfile(path) else []  # some names are too long to be asked for
    if os.path.isdir(path):
        files = sorted(x for x in path.rglob("*") if x.is_file())
    small = [x for x in files if not x.is_symlink() and x.stat().st_size < LARGE]
    case.about = f"mutant of {one.name[:80]}"
    for _ in range(dice.choice((1, 1, 2, 4)) if small else 0):
        file, change = dice.choice(small), dice.choice(BYTES)
        file.write_bytes(change(file.read_bytes(), dice))
        case.about += f", {change.__name__} {file.name[:30]}"
    return dataclasses.replace(one, codes=one.codes | HARMLESS.get(one.kind, {0}))


FAMILY = Family(
    "hostile",
    "a hostile file executes nothing and costs one line, 20 s of CPU and 1 GB at most",
    quick=250,
    long=5000,
    case=case,
    prepare=prepare,
    load=pairs,
)
