"""The verdict of results on an encoder: above, below, or not distinguishable from random init.

A line is one of results.jsonl, and may hold anything. Numbers are in percent where `unit` says so.
The verdict depends only on the interval of the difference to random init, never on the size of the
difference. Every table, page, card and diagnosis takes its words from here.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

from stopmim.base.files import number

Line = Mapping[str, Any]

LEVEL = 99  # percent, of the interval of a difference: a suite asks about ten questions at once
RANDOM_INIT = "random init"
ABOVE, EQUAL, BELOW = "above", "not distinguishable from", "below"
SHARES = ("value", "low", "high", "random_init", "a", "b")  # fractions in lines of old versions
# Keys of a line that are results; the others describe the evaluation.
FOUND = {"value", "low", "high", "random_init", "difference", "difference_low", "difference_high"}
FOUND |= {"chance", "verdict"}


def in_percent(line: Line) -> dict[str, Any]:
    """`line` in percent, whichever version wrote it.

    Older versions wrote fractions without a unit, and the videos of a suite into all its lines.
    """
    if "unit" in line:
        return dict(line)
    known = {key: x for key in SHARES if (x := number(line.get(key))) is not None}
    rank = "rankme" in (line.get("name"), line.get("protocol"))
    plain = rank or not all(0 <= x <= 1 for x in known.values())
    if plain and not str(line.get("name")).endswith(("decay", "difference")):  # may be negative
        return {**line, "unit": ""}
    foreign = line.get("protocol") != "tracking" and "test_data" in line
    kept = {key: value for key, value in line.items() if not (foreign and key == "videos")}
    return kept | {key: 100 * x for key, x in known.items()} | {"unit": "percent"}


# ------------------------------------------------------------------------------ of one result


def difference(line: Line) -> tuple[float, float, float] | None:
    """The difference to random init and its interval; None if either is unknown."""
    value, before = number(line.get("value")), number(line.get("random_init"))
    if value is None or before is None or line.get("unit") != "percent":
        return None
    found, keys = value - before, ("difference_low", "difference_high", "low", "high")
    low, high, own_low, own_high = (number(line.get(key)) for key in keys)
    if low is not None and high is not None:
        return found, low, high
    if own_low is None or own_high is None:
        return None
    # Without paired answers only the interval of the value is known, at 95 %. That of random init
    # is as wide, and 99 % are wanted: sqrt(2) * 1.31 is less than 2.
    half = own_high - own_low
    return found, found - half, found + half


def judge(low: float, high: float, lower_is_better: bool = False) -> str:
    """The word for a difference with this interval."""
    if low <= 0 <= high:
        return EQUAL
    return ABOVE if (low > 0) != lower_is_better else BELOW


def word(line: Line) -> str:
    """ABOVE, EQUAL or BELOW random init; "" if there is no interval to judge by."""
    found = difference(line)
    decays = str(line.get("name")).endswith("decay")
    return judge(*found[1:], lower_is_better=decays) if found else ""


def verdict(line: Line) -> str:
    """The verdict in words: "above random init" and the like, or ""."""
    found = word(line)
    return f"{found} {RANDOM_INIT}" if found else ""


def data_set(line: Line) -> str:
    """The data that a result is about."""
    found = line.get("videos" if line.get("protocol") == "tracking" else "test_data")
    return "" if found is None else str(found)


# ------------------------------------------------------------------------------ of all of them


class Tally(NamedTuple):
    """Number of questions on one data set that are above, equal to and below something."""

    data: str
    above: int
    equal: int
    below: int
    other: str = RANDOM_INIT

    @classmethod
    def of(cls, data: str, words: Sequence[str], other: str = RANDOM_INIT) -> Self:
        return cls(data, words.count(ABOVE), words.count(EQUAL), words.count(BELOW), other)

    def __str__(self) -> str:
        """``above random init in 3 of 4 questions, below random init in 1``; no zeros."""
        words = ((ABOVE, self.above), (EQUAL, self.equal), (BELOW, self.below))
        counts = [(f"{word} {self.other}", count) for word, count in words if count]
        total = self.above + self.equal + self.below
        if len(counts) == 1:
            every = {1: "the one question", 2: "both questions"}.get(
                total, f"all {total} questions"
            )
            return f"{counts[0][0]} in {every}"
        (first, count), *rest = counts
        parts = [f"{first} in {count} of {total} questions", *(f"{w} in {n}" for w, n in rest)]
        return ", ".join(parts)

    @property
    def sentence(self) -> str:
        where = f"On {self.data}, the" if self.data else "The"
        return f"{where} encoder is {self}."


def tallies(lines: Sequence[Line]) -> list[Tally]:
    """Counts of the verdicts on `lines`, per data set.

    Numbers chosen on the test split count only if there are no others. Of tracking only J&F counts,
    which sums up the rest.
    """
    groups: dict[str, list[Line]] = {}
    for line in newest(lines):
        part = line.get("protocol") == "tracking" and line.get("name") != "J&F"
        if word(line) and not part:
            groups.setdefault(data_set(line), []).append(line)
    found = []
    for data, group in groups.items():
        fair = [line for line in group if line.get("selection") != "paper"] or group
        found.append(Tally.of(data, [word(line) for line in fair]))
    return found


def resolution(lines: Sequence[Line]) -> list[str]:
    """A sentence on the resolution of the intervals, if one shows no difference; else none."""
    open_ones = [line for line in lines if word(line) == EQUAL]
    halves = sorted((d[2] - d[1]) / 2 for line in open_ones if (d := difference(line)))
    if not halves:
        return []
    sizes = sorted(n for line in open_ones if (n := number(line.get("n"))) is not None)
    images = f" with {sizes[0]:,.0f} test images" if sizes else ""
    return [
        f"Not distinguishable is no proof of equality: differences below about "
        f"{halves[len(halves) // 2]:.0f} points cannot be told apart{images}; more of them, or "
        f"more --random-inits, narrow this."
    ]


def newest(lines: Sequence[Line]) -> list[Line]:
    """One line per question, the last: a question may be asked again, by a newer version too."""
    last: dict[str, Line] = {}
    for line in lines:
        asked = {key: value for key, value in line.items() if key not in FOUND}
        last[repr(("value" in line, sorted(asked.items())))] = line
    return list(last.values())


def of_run(lines: Sequence[Line]) -> list[Line]:
    """The lines about the encoder of a run: of its newest step, and of one branch."""
    own = [line for line in lines if "A" not in line and line.get("step", 0) is not None]
    steps = [step for line in own if (step := number(line.get("step"))) is not None]
    # Lines of old versions have no step, and count while there are no others.
    own = [line for line in own if not steps or number(line.get("step")) == max(steps)]
    target = [line for line in own if line.get("branch", "target") == "target"]
    return target or own
