"""A hook of mkdocs: what the pages link to outside of docs/ becomes a part of the site.

In the repository a link reads ``../examples/linear_head.py``, so that it works on GitHub too.
Markdown becomes a page, a folder a list of the Markdown in it, anything else a file to read.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\(\.\./([^)#]+)")
TEXT = {".py", ".yaml"}  # browsers would offer these for download


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds every file that a page links to, and what those link to in turn."""
    pages = [file.content_string for file in files if file.is_documentation_page()]
    while pages:
        for name in sorted(set(LINK.findall(pages.pop()))):
            path, place = ROOT / name, site_name(name)
            if files.get_file_from_path(place) is not None:
                continue
            text = path.read_text() if path.is_file() else listing(path)
            files.append(File.generated(config, place, content=text))
            if place.endswith(".md"):
                pages.append(text)
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Follows the files: pages of docs/ are a folder higher in the site."""
    up = "../" if "/" in page.file.src_uri else ""
    return LINK.sub(lambda link: f"]({up}{site_name(link[1])}", markdown)


def listing(folder: Path) -> str:
    links = [f"- [{file.name}](../{file.relative_to(ROOT)})" for file in folder.glob("*.md")]
    return "\n".join([f"# {folder.name}", "", *sorted(links)])


def site_name(name: str) -> str:
    """Where a file of the repository is found in the site."""
    path = ROOT / name
    if path.is_dir():
        return f"{name}/index.md"
    return f"{name}.txt" if path.suffix in TEXT else name.removeprefix("docs/")
