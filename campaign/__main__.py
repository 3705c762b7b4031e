"""``python -m campaign``: runs families of faults and says what came out."""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from campaign import checkpoints, configs, hostile, kills, races, rank_faults, run_files, storage
from campaign.cases import Family, Outcome, run_family
from campaign.record import record, table, write_json, write_page
from stopmim.base.console import duration

FAMILIES = {
    module.FAMILY.name: module.FAMILY
    for module in (kills, checkpoints, run_files, configs, hostile, storage, races, rank_faults)
}


def options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m campaign", description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(FAMILIES))
    parser.add_argument("--long", action="store_true", help="hours instead of minutes")
    parser.add_argument("--count", type=int, help="cases per family")
    parser.add_argument("--only", help="numbers of cases, such as 17 or 17,30")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a record of everything")
    parser.add_argument("--page", type=Path, metavar="FILE.md", help="write the table into a page")
    parser.add_argument("--keep", action="store_true", help="keep the folders of all cases")
    chosen = parser.parse_args(words)
    if unknown := set(chosen.families) - FAMILIES.keys():
        parser.error(f"no family {min(unknown)}; there are {', '.join(FAMILIES)}")
    return chosen


def main(words: Sequence[str] | None = None) -> int:
    """Runs the campaign; returns 1 if a case has failed."""
    torch.set_num_threads(1)
    asked = options(words)
    root = Path(tempfile.mkdtemp(prefix="campaign-"))
    outcomes = [_run(FAMILIES[name], asked, root) for name in asked.families or FAMILIES]
    done = record(outcomes, asked.seed, asked.long)
    print(f"\n{table(outcomes)}\n\n{done.failed} failures; {done.machine}")
    if asked.json:
        write_json(done, asked.json)
    if asked.page:
        write_page(done, asked.page)
    if done.failed or asked.keep:
        print(f"folders of {'all' if asked.keep else 'the failed'} cases: {root}")
    else:
        shutil.rmtree(root)
    return 1 if done.failed else 0


def _run(family: Family, asked: argparse.Namespace, root: Path) -> Outcome:
    count = asked.count or (family.long if asked.long else family.quick)
    numbers = list(map(int, asked.only.split(","))) if asked.only else list(range(count))

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
