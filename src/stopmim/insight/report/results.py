"""Lines of results.jsonl as text for a table; a line may hold anything."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from stopmim.health.log import number

# Keys of a result that have a column of their own.
_COLUMNS = {"name", "protocol", "label", "value", "low", "high", "random_init", "n", "selection"}
# Keys that are the same for all results of a run, or shown elsewhere.
_FACTS = {"encoder", "branch", "step", "train_data", "test_data", "videos", "train", "setting"}
_FACTS |= {"seed"}


class ResultText(NamedTuple):
    """A line of the evaluation table, as text; "" for what is unknown."""

    protocol: str
    label: str
    of: str  # data, branch and step, if the run has results for more than one
    selection: str
    n: str
    value: str
    exact: str  # the value as it was recorded
    interval: str
    random_init: str
    difference: str
    verdict: str  # "up" or "down" if the interval excludes random init
    details: str
    bar: dict[str, str] | None  # positions in percent; None unless the value is a fraction


def as_text(line: Mapping[str, Any], differ: Collection[str] = ()) -> ResultText:
    """`line` as text, with the facts that `differ` between the lines."""
    value, random_init = number(line.get("value")), number(line.get("random_init"))
    low, high = number(line.get("low")), number(line.get("high"))
    given = [x for x in (value, random_init, low, high) if x is not None]
    # Accuracies, Jaccard indices and the like are fractions; RankMe is a plain number.
    fraction = value is not None and all(0 <= x <= 1 for x in given)
    percent = fraction or _falls(line)  # a decay may be negative, and has no bar then
    scale, plain, unit = (100, ".1f", " %") if percent else (1, ".4g", "")

    def text(x: float | None) -> str:
        return "" if x is None else f"{scale * x:{plain}}{unit}"

    interval = difference = verdict = ""
    bar = {"value": f"{100 * value:.2f}"} if fraction and value is not None else None
    if low is not None and high is not None:
        interval = f"{scale * low:{plain}} to {scale * high:{plain}}"
        if bar:
            bar |= {"low": f"{100 * low:.2f}", "wide": f"{100 * max(0.0, high - low):.2f}"}
    if bar and random_init is not None:
        bar |= {"random": f"{100 * random_init:.2f}"}
    if value is not None and random_init is not None:
        difference = f"{scale * (value - random_init):+{plain}}"
        better, worse = ("down", "up") if _falls(line) else ("up", "down")
        if low is not None and high is not None:
            verdict = better if low > random_init else worse if high < random_init else ""
    return ResultText(
        protocol=entry(line, "protocol"),
        label=entry(line, "label"),
        of=", ".join(words for name, words in _origin(line).items() if words and name in differ),
        selection=entry(line, "selection"),
        n=count_text(line.get("n")) or entry(line, "n"),
        value=text(value) or entry(line, "value"),
        exact=entry(line, "value"),
        interval=interval,
        random_init=text(random_init),
        difference=difference,
        verdict=verdict,
        details=", ".join(_details(line)),
        bar=bar,
    )


def _falls(line: Mapping[str, Any]) -> bool:
    """Whether lower is better."""
    return entry(line, "name").endswith("decay")


def _details(line: Mapping[str, Any]) -> Iterator[str]:
    """Everything without a column: the chosen setting, and any other key."""
    if line.get("protocol") == "tracking":
        yield entry(line, "name")
    if setting := entry(line, "setting"):
        yield setting
    yield from (f"{key} {line[key]}" for key in line if key not in _COLUMNS | _FACTS)


def _origin(line: Mapping[str, Any]) -> dict[str, str]:
    """Data, branch and step of a result in words; "" for what is unknown."""
    data = "videos" if line.get("protocol") == "tracking" else "test_data"
    words = {data: "on {}", "branch": "{} encoder", "step": "step {}"}
    found = {key: entry({"branch": "target", **line}, key) for key in words}
    return {key: text and words[key].format(text) for key, text in found.items()}


def differing(results: Sequence[Mapping[str, Any]]) -> set[str]:
    """Names among data, branch and step that differ between the results of a run."""
    seen = {("branch", "target encoder")}  # the default; the context encoder is always named
    seen |= {item for line in results for item in _origin(line).items()}
    keys = [key for key, _ in seen]
    return {key for key in keys if keys.count(key) > 1}


def best_result(results: Sequence[Mapping[str, Any]]) -> ResultText | None:
    """The result furthest above random init; one chosen on the test split only as a last resort."""

    def compares(line: Mapping[str, Any]) -> bool:
        # J&F sums up the numbers of tracking: none of the others is a result of its own.
        part = entry(line, "protocol") == "tracking" and entry(line, "name") != "J&F"
        text = as_text(line)
        return text.bar is not None and bool(text.difference) and not part

    def rank(line: Mapping[str, Any]) -> tuple[bool, float]:
        return line.get("selection") == "paper", line["random_init"] - line["value"]

    found = sorted(filter(compares, results), key=rank)
    return as_text(found[0], differing(results)) if found else None


def entry(line: Mapping[str, Any], key: str) -> str:
    value = line.get(key)
    return "" if value is None else str(value)


def count_text(value: object) -> str:
    """1024 as "1,024", 2.5 as "2.5", and anything but a number as ""."""
    x = number(value)
    return "" if x is None else f"{x:,.0f}" if x == int(x) else f"{x:,.1f}"


def time_text(seconds: float) -> str:
    for unit, length in (("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    whole = f"{seconds:.0f}"
    return f"{whole} second{'' if whole == '1' else 's'}"
