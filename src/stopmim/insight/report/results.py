"""Lines of results.jsonl as text for a table; anything may be in them."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from stopmim.insight.figures.curves import number

# Keys of a result that have a column of their own.
_COLUMNS = {"name", "protocol", "label", "value", "low", "high", "random_init", "n", "selection"}
# What is the same for all results of a run, or said otherwise.
_FACTS = {"encoder", "branch", "step", "train_data", "test_data", "videos", "train", "setting"}
_FACTS |= {"seed"}


class Result(NamedTuple):
    """A line of the evaluation table, as text; "" is what the line does not say."""

    protocol: str
    label: str
    of: str  # data, branch and step, where the run has results of more than one
    selection: str
    n: str
    value: str
    exact: str  # the value as it was recorded
    interval: str
    random_init: str
    difference: str
    verdict: str  # "up" or "down" if the interval excludes random init
    details: str
    bar: dict[str, str] | None  # positions in percent; None unless the value is a share


def shown(line: Mapping[str, Any], differ: Collection[str] = ()) -> Result:
    """`line` as text, with those of its facts that `differ` between the lines."""
    value, random_init = number(line.get("value")), number(line.get("random_init"))
    low, high = number(line.get("low")), number(line.get("high"))
    given = [x for x in (value, random_init, low, high) if x is not None]
    # Accuracies, Jaccard indices and the like are shares; RankMe, say, is a plain number.
    share = value is not None and all(0 <= x <= 1 for x in given)
    percent = share or _falls(line)  # the loss of a share may be a gain: below 0, and no bar

    def text(x: float | None) -> str:
        return "" if x is None else f"{100 * x:.1f} %" if percent else f"{x:.4g}"

    interval = difference = verdict = ""
    if low is not None and high is not None:
        interval = f"{100 * low:.1f} to {100 * high:.1f}" if percent else f"{low:.4g} to {high:.4g}"
    if value is not None and random_init is not None:
        gain = value - random_init
        better, worse = ("down", "up") if _falls(line) else ("up", "down")
        difference = f"{100 * gain:+.1f}" if percent else f"{gain:+.4g}"
        if low is not None and high is not None:
            verdict = better if low > random_init else worse if high < random_init else ""
    bar = None
    if share and value is not None:
        bar = {"value": f"{100 * value:.2f}"}
        if low is not None and high is not None:
            bar |= {"low": f"{100 * low:.2f}", "wide": f"{100 * max(0.0, high - low):.2f}"}
        if random_init is not None:
            bar |= {"random": f"{100 * random_init:.2f}"}
    return Result(
        protocol=said(line, "protocol"),
        label=said(line, "label"),
        of=", ".join(text for name, text in _origin(line).items() if text and name in differ),
        selection=said(line, "selection"),
        n=count(line.get("n")) or said(line, "n"),
        value=text(value) or said(line, "value"),
        exact=said(line, "value"),
        interval=interval,
        random_init=text(random_init),
        difference=difference,
        verdict=verdict,
        details=", ".join(_details(line)),
        bar=bar,
    )


def _falls(line: Mapping[str, Any]) -> bool:
    """Whether less of it is better."""
    return said(line, "name").endswith("decay")


def _is_part(line: Mapping[str, Any]) -> bool:
    """Whether it is one of the numbers of tracking that J&F sums up, or that go with it."""
    return said(line, "protocol") == "tracking" and said(line, "name") != "J&F"


def _details(line: Mapping[str, Any]) -> Iterator[str]:
    """What no column has: the setting that was chosen, and whatever somebody else noted."""
    if line.get("protocol") == "tracking":
        yield said(line, "name")
    if setting := said(line, "setting"):
        yield setting
    yield from (f"{key} {line[key]}" for key in line if key not in _COLUMNS | _FACTS)


def _origin(line: Mapping[str, Any]) -> dict[str, str]:
    """What was measured on what, in words; "" is what the line does not say."""
    data = "videos" if line.get("protocol") == "tracking" else "test_data"
    words = {data: "on {}", "branch": "{} encoder", "step": "step {}"}
    found = {key: said({"branch": "target", **line}, key) for key in words}
    return {key: text and words[key].format(text) for key, text in found.items()}


def differing(results: Sequence[Mapping[str, Any]]) -> set[str]:
    """Which of data, branch and step are not the same in all lines of a run."""
    seen = {("branch", "target encoder")}  # goes without saying; the context encoder never does
    seen |= {item for line in results for item in _origin(line).items()}
    keys = [key for key, _ in seen]
    return {key for key in keys if keys.count(key) > 1}


def best(results: Sequence[Mapping[str, Any]]) -> Result | None:
    """The result furthest above random init; one chosen on the test split only if need be."""
    compared = [
        line
        for line in results
        if (text := shown(line)).bar is not None and text.difference and not _is_part(line)
    ]
    compared.sort(key=lambda line: line["value"] - line["random_init"], reverse=True)
    compared.sort(key=lambda line: line.get("selection") == "paper")
    return shown(compared[0], differing(results)) if compared else None


def said(line: Mapping[str, Any], key: str) -> str:
    value = line.get(key)
    return "" if value is None else str(value)


def count(value: object) -> str:
    """1024 as "1,024", 2.5 as "2.5", and what is no number as ""."""
    x = number(value)
    return "" if x is None else f"{x:,.0f}" if x == int(x) else f"{x:,.1f}"


def time(seconds: float) -> str:
    for unit, length in (("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    whole = f"{seconds:.0f}"
    return f"{whole} second{'' if whole == '1' else 's'}"
