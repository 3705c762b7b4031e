"""Numbers in words, and tables of text: aligned for a terminal, or Markdown.

A row maps column names to cells.
"""

from collections.abc import Collection, Mapping, Sequence


def counted(count: int, noun: str) -> str:
    """The number of things, as "1 image" or "1,000 images"."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def spoken(seconds: float) -> str:
    """A duration as people say it: "40 seconds", "6 minutes", "3 hours"."""
    for unit, size, upto in (("second", 1, 90), ("minute", 60, 90), ("hour", 3600, 48)):
        if seconds < upto * size:
            return counted(max(1, round(seconds / size)), unit)
    return f"{round(seconds / 86400):,} days"


def aligned(rows: Sequence[Mapping[str, str]], right: Collection[str] = ()) -> str:
    """Aligned columns, those in `right` flush right; columns without any text are left out."""
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    width = {name: max(len(name), *(len(row[name]) for row in rows)) for name in names}
    lines = [{name: name for name in names}, *rows]
    return "\n".join(
        "  ".join(
            line[name].rjust(width[name]) if name in right else line[name].ljust(width[name])
            for name in names
        ).rstrip()
        for line in lines
    )


def markdown(rows: Sequence[Mapping[str, str]], right: Collection[str] = ()) -> str:
    """A Markdown table; pipes in cells are escaped."""
    names = list(rows[0])
    lines = [names, ["---:" if name in right else "---" for name in names]]
    lines += [[row[name].replace("|", "\\|") for name in names] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
