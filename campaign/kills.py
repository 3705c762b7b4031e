"""`kill -9` at a step, at a moment, inside a save, several times in a row: nothing is lost."""

import signal
from pathlib import Path

from campaign.cases import Case, Family, need
from campaign.processes import Ended, Started
from campaign.sample import need_same
from kill import SAVING, attempt
from stopmim.config.schema import Config
from tiny import tiny, tiny_mae

# What is trained; the workers of a run that is killed must end by themselves.
KINDS: dict[str, Config] = {
    "plain": tiny(),
    "mae": tiny_mae(),
    "every": tiny(runtime={"save_every": 1}),
    "workers": tiny(runtime={"workers": 2}),
}


def prepare(folder: Path) -> None:
    for name, config in KINDS.items():
        assert attempt(folder / name, None, config) == 0, name


def fault(case: Case, inside: bool) -> str:
    """A point where the run is killed: see tests/kill.py."""
    dice = case.dice
    if inside:  # the thread that saves; slowly: training is ahead of it
        slow = dice.choice(("", "slow:"))
        return f"{slow}{dice.choice((*SAVING, 'save.pruned'))}@{dice.randint(1, 3)}"
    if dice.random() < 0.5:
        return f"{dice.choice(('', 'slow:'))}step.end@{dice.randint(1, 10)}"
    return f"after@{dice.uniform(0.02, 0.6):.3f}"


def case(case: Case) -> None:
    name = case.dice.choices(list(KINDS), (3, 2, 2, 1))[0]
    out = case.folder / "run"
    chain = [fault(case, inside=case.number % 3 < 2)]  # some are never reached
    chain += [fault(case, case.dice.random() < 0.5) for _ in range(case.dice.choice((0, 0, 1, 2)))]
    case.about = f"{name} {','.join(chain)}"
    for i, point in enumerate(chain):
        done = _attempt(case, out, point, KINDS[name], i)
        need(done.code in (0, signal.SIGKILL), f"{point}: {done}")
        case.counts["kills"] += done.code == signal.SIGKILL
    done = _attempt(case, out, None, KINDS[name], len(chain))
    need(done.code == 0, f"not resumed: {done}")
    need_same(out, case.shared / name)
    need(len(list((out / "checkpoints").iterdir())) == 2, "checkpoints are left over")


def _attempt(case: Case, out: Path, point: str | None, config: Config, i: int) -> Ended:
    def job() -> int:
        return attempt(out, point, config)

    done = Started(job, case.folder / f"attempt{i}").finish()
    need(not done.left, f"{point}: left behind {', '.join(done.left)[:300]}")
    if done.code and point and "save." in point:
        case.counts["inside saves"] += 1
    return done


FAMILY = Family(
    "kills",
    "a run that was killed and started again is the run that never was, bit for bit",
    quick=40,
    long=320,
    case=case,
    prepare=prepare,
)
