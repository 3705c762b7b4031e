"""Lines of results.jsonl as text for a table; a line may hold anything."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from stopmim.base.files import number
from stopmim.runs.verdict import ABOVE, BELOW, difference, newest, word

# Keys of a result that have a column of their own.
_COLUMNS = {"name", "protocol", "label", "value", "low", "high", "random_init", "n", "selection"}
_COLUMNS |= {"difference", "difference_low", "difference_high", "chance", "verdict", "unit"}
# Keys that are the same for all results of a run, or shown elsewhere.
_FACTS = {"encoder", "branch", "step", "train_data", "test_data", "videos", "train", "setting"}
_FACTS |= {"seed", "options"}
_COLOURS = {ABOVE: "up", BELOW: "down"}


def table(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """The rows of the evaluation table: the newest answer to every question."""
    differ = differing(lines)
    return [as_text(line, differ) for line in newest(lines)]


def as_text(line: Mapping[str, Any], differ: Collection[str] = ()) -> dict[str, str]:
    """A row of the evaluation table; "" for unknown cells.

    `of` names data, branch and step if they `differ` between lines; `colour` is "up" or "down" if
    the verdict is above or below random init. The bar is drawn with `fill`, `left`, `wide` and
    `random`, all in percent if the value is.
    """
    keys = ("value", "random_init", "low", "high", "chance")
    value, random_init, low, high, chance = (number(line.get(key)) for key in keys)
    percent = line.get("unit") == "percent"
    plain, unit = (".1f", " %") if percent else (".4g", "")
    given = [x for x in (value, random_init, low, high) if x is not None]
    drawn = percent and all(0 <= x <= 100 for x in given)  # a decay may be negative

    def text(x: float | None) -> str:
        return "" if x is None else f"{x:{plain}}{unit}"

    def place(x: float | None) -> str:
        return f"{x:.2f}" if drawn and x is not None else ""

    name = entry(line, "name") if line.get("protocol") == "tracking" else ""
    others = [f"{key} {line[key]}" for key in line if key not in _COLUMNS | _FACTS]
    options = line.get("options")
    others += [f"{k} {v}" for k, v in options.items()] if isinstance(options, dict) else []
    row = {key: entry(line, key) for key in ("protocol", "label", "selection")} | {
        "of": ", ".join(words for key, words in _origin(line).items() if words and key in differ),
        "n": count_text(line.get("n")) or entry(line, "n"),
        "value": text(value) or entry(line, "value"),
        "exact": entry(line, "value"),
        "random_init": text(random_init),
        "chance": text(chance),
        "details": ", ".join(filter(None, (name, entry(line, "setting"), *others))),
        **dict.fromkeys(("interval", "difference", "left", "wide"), ""),
        "verdict": word(line).removesuffix(" from"),  # its legend says what it is compared with
        "colour": _COLOURS.get(word(line), ""),
        "fill": place(value),
        "random": place(random_init),
    }
    if low is not None and high is not None:
        row["interval"] = f"{low:{plain}} to {high:{plain}}"
        row |= {"left": place(low), "wide": place(max(0.0, high - low))}
    if value is not None and random_init is not None:
        row["difference"] = f"{value - random_init:+{plain}}"
    if gain := difference(line):
        row["difference"] += f" \u00b1 {(gain[2] - gain[1]) / 2:.1f}"
    return row


def _origin(line: Mapping[str, Any]) -> dict[str, str]:
    """Data, branch and step of a result in words; "" if unknown."""
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
