"""The pages of docs/ as a site: in a real browser, whole at every width, and from a folder."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from browser import Browser

ROOT = Path(__file__).parents[1]
# What sticks out of the window or of a box that hides the rest; boxes that scroll are fine.
CUT_OFF = """(() => {
  const found = [];
  if (document.documentElement.scrollWidth > innerWidth) found.push("the page scrolls sideways");
  const scrolls = e =>
    e && (/auto|scroll/.test(getComputedStyle(e).overflowX) || scrolls(e.parentElement));
  for (const e of document.querySelectorAll("article *, .md-header *, .md-footer *")) {
    const box = e.getBoundingClientRect(), style = getComputedStyle(e);
    if (!box.width || !box.height || style.visibility === "hidden") continue;
    if (e.closest(".md-search, .md-clipboard, .headerlink, svg")) continue;
    const name = e.tagName + " " + e.textContent.trim().slice(0, 40);
    if ((box.right > innerWidth + 1 || box.left < -1) && !scrolls(e.parentElement))
      found.push(name + ": beyond the window");
    if (style.overflowX === "hidden" && e.scrollWidth > e.clientWidth + 1 && e.closest("article"))
      found.push(name + ": cut off by its own box");
    if (e.tagName === "IMG" && !e.naturalWidth) found.push(e.src + ": not shown");
  }
  return found;
})()"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("wide", [1400, 768, 390])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_no_page_complains_or_is_cut_off(site: Path, tmp_path: Path, wide: int, dark: bool) -> None:
    backgrounds = set()
    with Browser(tmp_path / "profile", dark=dark, wide=wide) as browser:
        for page in sorted((ROOT / "docs").glob("*.md")):
            browser.open(site / f"{page.stem}.html")
            assert not browser.ask(CUT_OFF), page.name
            assert not browser.errors, page.name
            backgrounds.add(browser.ask("getComputedStyle(document.body).backgroundColor"))
        elsewhere = [u for u in browser.requests if not u.startswith(("file:", "data:", "about:"))]
    assert not elsewhere
    (colour,) = backgrounds
    assert (sum(map(int, re.findall(r"\d+", colour)[:3])) < 3 * 80) == dark


def until(page: Browser, expression: str) -> Any:
    """The value of an expression as soon as it has one."""
    deadline = time.monotonic() + 20
    while not (value := page.ask(expression)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return value


@pytest.mark.slow
def test_search_and_copy_work_from_a_folder(site: Path, tmp_path: Path) -> None:
    with Browser(tmp_path / "profile") as page:
        page.open(site / "index.html")
        page.click("article pre [data-md-type=copy]")
        said = until(page, "document.querySelector('.md-dialog').textContent.trim()")
        assert said == "Copied to clipboard"
        page.click(".md-search__input")
        for letter in "tensorboard":
            page.key(letter)
        links = "[...document.querySelectorAll('.md-search-result__link')].map(a => a.href)"
        found = until(page, links)
        assert any("analyse.html" in link for link in found), page.errors
        assert not page.errors


@pytest.mark.slow
def test_every_link_of_the_site_leads_somewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        if page.name == "404.html":  # its links are for a server
            continue
        for target in re.findall(r'(?:href|src)="([^"#:?]+)["#?]', page.read_text()):
            there = page.parent / target
            assert there.exists(), f"{page.name}: {target}"
