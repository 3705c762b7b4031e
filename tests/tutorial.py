"""The output on docs/photos.md: ``make tutorial`` runs the page from top to bottom and writes it.

Every block of commands or Python runs in one new folder, in order. What it prints goes between the
two comments that follow it, ``<!-- output -->`` and ``<!-- end -->``; long output is shortened as
the comment says. It takes as long as the commands take: minutes.
"""

import datetime
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from browser import Browser
from stopmim import __version__

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "photos.md"
FIGURES = ROOT / "docs" / "figures"
COLUMNS, WIDE = 80, 1000  # of the terminal; pixels of a picture
_BLOCK = re.compile(
    r"```(?P<kind>sh|python)\n(?P<code>.*?)```\n\n"
    r"(?P<open><!-- output(?:: (?:(?P<first>\d+) first)?(?:, )?(?:(?P<last>\d+) last)?)? -->\n)"
    r"(?P<shown>.*?)(?P<close><!-- end -->)",
    re.S,
)
_MADE = re.compile(r"(<!-- made -->).*?(<!-- end -->)", re.S)


class Block(NamedTuple):
    """Something to run, and what the page shows of its output."""

    kind: str
    code: str
    shown: str


def blocks(text: str) -> list[Block]:
    return [Block(found["kind"], found["code"], found["shown"]) for found in _BLOCK.finditer(text)]


def run(kind: str, code: str, folder: Path) -> str:
    """What a block prints, both streams in order, as on a terminal without colours."""
    paths = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    environment = os.environ | {"COLUMNS": str(COLUMNS), "NO_COLOR": "1", "TERM": "dumb"}
    environment |= {"PATH": os.pathsep.join(paths), "PYTHONPATH": str(ROOT / "src")}
    command = ["bash", "-euc", code] if kind == "sh" else [sys.executable, "-c", code]
    pipe, stdout = subprocess.PIPE, subprocess.STDOUT
    done = subprocess.run(command, cwd=folder, env=environment, stdout=pipe, stderr=stdout)
    said = done.stdout.decode()
    if done.returncode:
        raise SystemExit(f"{code}exit code {done.returncode}:\n{said}")
    # Of a line that was drawn again and again, what stands there at last.
    lines = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in said.split("\n")]
    return "\n".join(lines).strip("\n")


def shortened(text: str, first: int, last: int) -> str:
    """The first and last lines, or all if neither number is given or none would be left out."""
    lines = text.splitlines()
    if not first + last or len(lines) <= first + last + 1:
        return text
    return "\n".join([*lines[:first], "...", *lines[len(lines) - last :]])


def filled(text: str, folder: Path) -> str:
    """The page with the output of now."""

    def fill(found: re.Match[str]) -> str:
        print(found["code"], end="", flush=True)
        numbers = (int(found[name] or 0) for name in ("first", "last"))
        said = shortened(run(found["kind"], found["code"], folder), *numbers)
        shown = f"\n```text\n{said}\n```\n\n" if said else ""
        return found[0][: found.start("shown") - found.start()] + shown + found["close"]

    text = _BLOCK.sub(fill, text)
    today = datetime.datetime.now(datetime.UTC).date()
    made = f"stopmim {__version__}, {os.cpu_count()} CPU cores, no GPU, {today}"
    return _MADE.sub(rf"\g<1>{made}\g<2>", text)


def draw(text: str, run: Path) -> None:
    """The pictures of the page: of the report, or a figure that a command left in the run."""
    for name in re.findall(r"\(figures/photos-(\w+)\.png\)", text):
        source = run / "figures" / f"{name}.png"
        if name == "report":
            with (
                tempfile.TemporaryDirectory() as profile,
                Browser(Path(profile), wide=1000) as page,
            ):
                page.call("Emulation.setScrollbarsHidden", hidden=True)
                page.open(run / "report.html")
                page.ask("document.querySelector('.path').textContent = 'runs/photos'")
                (source := run / "report.png").write_bytes(page.screenshot())
        picture = Image.open(source).convert("RGB")
        picture.thumbnail((WIDE, 2 * WIDE))
        picture.quantize(128).save(FIGURES / f"photos-{name}.png", optimize=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "examples").symlink_to(ROOT / "examples")
        PAGE.write_text(filled(PAGE.read_text(), place))
        draw(PAGE.read_text(), place / "runs" / "photos")
