"""``python -m campaign``: runs families of faults and says what came out."""

import argparse
import contextlib
import importlib
import pkgutil
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

import stopmim
from campaign import (
    checkpoints,
    configs,
    hostile,
    kills,
    races,
    rank_faults,
    run_files,
    storage,
    surroundings,
)
from campaign.cases import Family, Outcome, run_family
from campaign.record import Record, commit, read_json, record, sum_of, table, write_json, write_page
from stopmim.base.console import duration

FAMILIES = {
    module.FAMILY.name: module.FAMILY
    for module in (
        *(kills, checkpoints, run_files, configs, hostile, storage, races, rank_faults),
        surroundings,
    )
}


def options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m campaign", description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(FAMILIES))
    parser.add_argument("--long", action="store_true", help="hours instead of minutes")
    parser.add_argument("--count", type=int, help="cases per family")
    parser.add_argument("--only", help="numbers of cases, such as 17 or 17,30-39")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a record of everything")
    parser.add_argument("--page", type=Path, metavar="FILE.md", help="write the table into a page")
    parser.add_argument(
        "--records", type=Path, nargs="+", metavar="FILE", help="run nothing: add up what was run"
    )
    parser.add_argument("--keep", action="store_true", help="keep the folders of all cases")
    chosen = parser.parse_args(words)
    if unknown := set(chosen.families) - FAMILIES.keys():
        parser.error(f"no family {min(unknown)}; there are {', '.join(FAMILIES)}")
    return chosen


def main(words: Sequence[str] | None = None) -> int:
    """Runs the campaign; returns 1 if a case has failed."""
    asked = options(words)
    done = add_up(asked.records) if asked.records else run(asked)
    print(f"\n{table(done.outcomes)}\n\n{done.failed} failures; {done.machine}")
    if asked.json:
        write_json(done, asked.json)
    if asked.page:
        write_page(done, asked.page, {name: family.long for name, family in FAMILIES.items()})
    return 1 if done.failed else 0


def add_up(paths: Sequence[Path]) -> Record:
    """What earlier campaigns have recorded, in the order of the families."""
    found = sum_of([read_json(path) for path in paths])
    order = list(FAMILIES)
    return replace(found, outcomes=sorted(found.outcomes, key=lambda one: order.index(one.family)))


def run(asked: argparse.Namespace) -> Record:
    code = commit()  # of now: it may change meanwhile
    load_everything()
    root = Path(tempfile.mkdtemp(prefix="campaign-"))
    outcomes = [_run(FAMILIES[name], asked, root) for name in asked.families or FAMILIES]
    done = record(outcomes, code, asked.seed)
    if done.failed or asked.keep:
        print(f"folders of {'all' if asked.keep else 'the failed'} cases: {root}")
    else:
        shutil.rmtree(root)
    return done


def load_everything() -> None:
    """Imports here what commands would import, so that each of thousands need not."""
    torch.set_num_threads(1)
    for module in pkgutil.walk_packages(stopmim.__path__, "stopmim."):
        with contextlib.suppress(ImportError):  # an extra that is not installed
            importlib.import_module(module.name)


def numbers_of(text: str) -> list[int]:
    """17,30-39 as numbers."""
    parts = [part.split("-") for part in text.split(",")]
    return [number for part in parts for number in range(int(part[0]), int(part[-1]) + 1)]


def _run(family: Family, asked: argparse.Namespace, root: Path) -> Outcome:
    count = asked.count or (family.long if asked.long else family.quick)
    numbers = numbers_of(asked.only) if asked.only else list(range(count))

    def tell(outcome: Outcome, number: int, problem: str) -> None:
        if problem:
            print(f"\r{family.name} {number}: {problem}")
            again = f"python -m campaign {family.name} --only {number} --seed {asked.seed}"
            print(f"  again: {again}", flush=True)
        elif sys.stdout.isatty() or outcome.cases % 100 == 0 or outcome.cases == len(numbers):
            end = "\r" if sys.stdout.isatty() and outcome.cases < len(numbers) else "\n"
            failed = f", {len(outcome.failures)} failed" if outcome.failures else ""
            share = f"{outcome.cases}/{len(numbers)}"
            print(
                f"{family.name} {share}{failed}, {duration(outcome.seconds)}", end=end, flush=True
            )

    return run_family(
        family,
        numbers,
        seed=asked.seed,
        jobs=asked.jobs,
        root=root,
        keep=asked.keep,
        tell=tell,
    )


if __name__ == "__main__":
    sys.exit(main())
