"""Lines of results.jsonl as text for a table; a line may hold anything."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from stopmim.health.log import number

# Keys of a result that have a column of their own.
_COLUMNS = {"name", "protocol", "label", "value", "low", "high", "random_init", "n", "selection"}
# Keys that are the same for all results of a run, or shown elsewhere.
_FACTS = {"encoder", "branch", "step", "train_data", "test_data", "videos", "train", "setting"}
_FACTS |= {"seed"}


def as_text(line: Mapping[str, Any], differ: Collection[str] = ()) -> dict[str, str]:
    """A row of the evaluation table; "" for what is unknown.

    `of` says data, branch and step as far as they `differ` between lines; `verdict` is "up" or
    "down" if the interval excludes random init. The bar is drawn with `fill`, `left`, `wide` and
    `random`, all in percent, if the value is a fraction.
    """
    keys = ("value", "random_init", "low", "high")
    value, random_init, low, high = (number(line.get(key)) for key in keys)
    falls = entry(line, "name").endswith("decay")  # lower is better
    given = [x for x in (value, random_init, low, high) if x is not None]
    # Accuracies, Jaccard indices and the like are fractions; RankMe is a plain number.
    fraction = value is not None and all(0 <= x <= 1 for x in given)
    percent = fraction or falls  # a decay may be negative, and has no bar then
    scale, plain, unit = (100, ".1f", " %") if percent else (1, ".4g", "")

    def text(x: float | None) -> str:
        return "" if x is None else f"{scale * x:{plain}}{unit}"

    def place(x: float | None) -> str:
        return f"{100 * x:.2f}" if fraction and x is not None else ""

    name = entry(line, "name") if line.get("protocol") == "tracking" else ""
    others = [f"{key} {line[key]}" for key in line if key not in _COLUMNS | _FACTS]
    row = {key: entry(line, key) for key in ("protocol", "label", "selection")} | {
        "of": ", ".join(words for key, words in _origin(line).items() if words and key in differ),
        "n": count_text(line.get("n")) or entry(line, "n"),
        "value": text(value) or entry(line, "value"),
        "exact": entry(line, "value"),
        "random_init": text(random_init),
        "details": ", ".join(filter(None, (name, entry(line, "setting"), *others))),
        **dict.fromkeys(("interval", "difference", "verdict", "left", "wide"), ""),
        "fill": place(value),
        "random": place(random_init),
    }
    if low is not None and high is not None:
        row["interval"] = f"{scale * low:{plain}} to {scale * high:{plain}}"
        row |= {"left": place(low), "wide": place(max(0.0, high - low))}
    if value is not None and random_init is not None:
        row["difference"] = f"{scale * (value - random_init):+{plain}}"
        if low is not None and high is not None and not low <= random_init <= high:
            row["verdict"] = "up" if (low > random_init) != falls else "down"
    return row


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


def best_result(results: Sequence[Mapping[str, Any]]) -> dict[str, str] | None:
    """The result furthest above random init; one chosen on the test split only as a last resort."""

    def compares(line: Mapping[str, Any]) -> bool:
        # J&F sums up the numbers of tracking: none of the others is a result of its own.
        part = entry(line, "protocol") == "tracking" and entry(line, "name") != "J&F"
        row = as_text(line)
        return bool(row["fill"] and row["difference"]) and not part

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
