import base64
import hashlib
import io
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from browser import Browser
from stopmim.base.errors import CheckpointError
from stopmim.cli import main
from stopmim.config.schema import from_yaml
from stopmim.data.sources.open import open_images
from stopmim.insight.figures import curves, similarity
from stopmim.insight.report import explorer
from stopmim.insight.report.page import PREVIEWS, write_report
from stopmim.insight.report.results import as_text
from stopmim.method.build import build, configure
from stopmim.runs.run import Run
from stopmim.runs.verdict import in_percent
from stopmim.train.loop import pretrain
from tiny import NoiseImages, tiny, tiny_mae

# Of a run that predicts features; one more is for pixels.
PANELS = [panel for panel in curves.PANELS if "feature_rank" not in panel.series]
SCRIPT = hashlib.sha256(explorer.SCRIPT.encode()).digest()
CSP = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-"
    f"{base64.b64encode(SCRIPT).decode()}'; base-uri 'none'; form-action 'none'"
)

RESULTS: list[dict[str, Any]] = [
    {
        "protocol": "knn",
        "label": "count",
        "value": 0.4123,
        "low": 0.389,
        "high": 0.432,
        "random_init": 0.22,
        "n": 2000,
        "selection": "held-out",
        "k": 20,
    },
    {"protocol": "linear", "label": "distance", "value": 0.5, "random_init": 0.61, "n": 2000},
    {"protocol": "linear", "label": "count", "value": 0.7, "random_init": 0.1}
    | {"selection": "paper"},
    {"protocol": "rankme", "value": 21.25, "random_init": 6.5},
    {"value": 0.0625},
    {},
]

# Text that has broken other reports: tags, attributes, URLs, templates, comments, control
# characters, text direction, lone surrogates.
PAYLOADS = (
    "<script>alert(1)</script>",
    "</title><script src=//evil.example/x.js></script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    '" style="background:url(https://evil.example/)',
    "</style><style>body{display:none}</style>",
    "</pre></details><iframe src=javascript:alert(1)></iframe>",
    "<svg/onload=alert(1)>",
    "javascript:alert(1)",
    "{{ 7 * 7 }}{% for x in y %}{# #}",
    "<!-- --!> <![CDATA[ x ]]>",
    "&lt;b&gt;&#60;i&#62;&amp;",
    "\x1b]0;owned\x07\x00\x08\r\n\t\x7f\x9b31m",
    "\u202egnp.exe\u2066\u200b\ufeff",
    "\ud800 lone \udcff surrogates \udfff",
)


class Pixels:
    """Images of random pixels, of three classes."""

    labels: dict[str, np.ndarray] = {"class": np.arange(32) % 3}  # noqa: RUF012 - as the protocol has it
    classes = ("cats", "dogs", "<i>birds</i>")
    fingerprint = "pixels"

    def __len__(self) -> int:
        return 32

    def read(self, i: int) -> np.ndarray:
        return np.random.default_rng(i).integers(0, 256, (50, 50, 3), dtype=np.uint8)

    def name(self, i: int) -> str:
        return f"image {i}"


class Page(HTMLParser):
    """Tags with their attributes, and text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_data(self, data: str) -> None:
        (self.scripts if self.tags[-1:] and self.tags[-1][0] == "script" else self.words).append(
            data
        )

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    @property
    def skeleton(self) -> list[tuple[str, tuple[str, ...]]]:
        return [(tag, tuple(attributes)) for tag, attributes in self.tags]

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of two updates with results; its images are gone."""
    path = tmp_path_factory.mktemp("runs") / "trained"
    run = pretrain(
        Pixels(),
        path,
        "tiny_cpu",
        optim={"epochs": 1, "warmup_epochs": 0.5, "batch_size": 16},
        runtime={"log_every": 1, "workers": 0},
    )
    for result in RESULTS:
        run.add_result(**result)
    return run


@pytest.fixture(scope="module")
def full(trained: Run) -> Page:
    """The page of that run, with everything on it."""
    return Page(write_report(trained, Pixels()))


def bare(run: Run, path: Path, **about: Any) -> Run:
    """A run that consists of run.json only, with parts of it replaced."""
    path.mkdir(parents=True)
    (path / "run.json").write_text(json.dumps(run.about | about))
    return Run(path)


# ------------------------------------------------------------------------------ one closed file


def test_the_page_is_in_the_run_directory_and_nothing_else_is_left_there(
    trained: Run, full: Page
) -> None:
    page = trained.path / "report.html"
    assert page.stat().st_size < 1_000_000
    assert [p.name for p in trained.path.iterdir() if p.name.startswith(".")] == []


def test_the_page_runs_its_one_script_and_loads_nothing(full: Page) -> None:
    assert full.all("script") == [{"type": "application/json", "id": "data"}, {}]
    _, code = [text for text in full.scripts if text.strip()]
    assert hashlib.sha256(code.encode()).digest() == SCRIPT
    for way in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "fetch(", "eval("):
        assert way not in code
    for tag, attributes in full.tags:
        assert tag not in ("iframe", "object", "embed", "link", "base", "form", "foreignobject")
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in ("src", "href", "xlink:href", "action", "data", "srcset", "poster"):
                assert value.startswith(("data:image/png;base64,", "#")), (tag, name, value[:60])
            if not name.startswith("xmlns"):
                assert "://" not in value, (tag, name, value[:60])
            assert "url(" not in value.replace("url(#", ""), (tag, name, value[:60])
    assert "@import" not in full.source
    assert "url(" not in full.source.replace("url(#", "")


def test_the_page_forbids_the_browser_to_run_anything_else_or_to_load_anything(full: Page) -> None:
    policies = [meta for meta in full.all("meta") if "http-equiv" in meta]
    assert policies == [{"http-equiv": "Content-Security-Policy", "content": CSP}]
    names = [tag for tag, _ in full.tags]
    assert names.index("style") > full.tags.index(("meta", policies[0]))


def test_writing_the_page_again_gives_the_same_page(trained: Run, full: Page) -> None:
    assert Page(write_report(trained, Pixels())).source == full.source


# ------------------------------------------------------------------------------ what it says


def test_every_result_is_on_the_page_as_recorded(full: Page) -> None:
    recorded = ["41.23", "50.0", "70.0", "21.25", "6.25"]  # fractions became percent
    assert [data["value"] for data in full.all("data") if data["value"]] == recorded
    texts = ("41.2 %", "38.9 to 43.2", "22.0 %", "+19.2 \u00b1 4.3", "2,000", "held-out", "k 20")
    for shown in texts:
        assert shown in full.text
    for shown in ("50.0 %", "61.0 %", "-11.0", "70.0 %", "21.25", "6.5", "+14.75", "6.2 %"):
        assert shown in full.text


def test_a_bar_has_its_value_its_interval_and_random_init(full: Page) -> None:
    spans = [span for span in full.all("span") if "style" in span][:3]
    assert spans == [
        {"class": "fill", "style": "width:41.23%"},
        {"class": "interval", "style": "left:38.90%;width:4.30%"},
        {"class": "random", "style": "left:22.00%"},
    ]
    fills = [span for span in full.all("span") if span.get("class") == "fill"]
    assert len(fills) == 4  # rankme is no share, and the last line says nothing


def test_a_difference_is_judged_only_by_an_interval(full: Page) -> None:
    judged = [cell["class"] for cell in full.all("td") if cell.get("class", "")[:4] == "num "]
    assert [c for c in judged if c != "num "] == ["num up"]


def test_the_summary_says_how_well_and_then_what_was_trained_on_what(full: Page) -> None:
    text = full.text.replace(" ,", ",").replace("pixels,", "pixels ,", 1)
    first = "The encoder is above random init in the one question."  # the others have no interval
    assert text.index(first) < text.index("A vit_micro6 encoder was pretrained")
    for said in (
        "A vit_micro6 encoder was pretrained by I-JEPA + StoP (sigma 0.25) on 32 unlabelled",
        "images from pixels , seen at 48 x 48 pixels",  # parts of the text are set in bold
        "It has made 2 updates, 1 of 1 epochs, in",
    ):
        assert said in text, said


def test_every_panel_of_curves_is_drawn_from_what_training_logs(full: Page) -> None:
    labels = [div["aria-label"] for div in full.all("div") if div.get("role") == "img"]
    for panel in PANELS:
        (label,) = [text for text in labels if text.startswith(f"{panel.title}. ")]
        # What is measured now and then begins with the untrained network, at step 0.
        begun = label.count(" at step 1,") + label.count(" at step 0,")
        assert begun == label.count(" at step 2") == len(panel.series)


def test_every_figure_has_words_for_those_who_do_not_see_it(full: Page) -> None:
    described = [div["aria-label"] for div in full.all("div") if div.get("role") == "img"]
    assert len(full.all("svg")) == len(described) == len(PANELS) + PREVIEWS + 1
    assert min(map(len, described)) > 20
    assert not full.all("img")


def test_headings_are_nested_ids_are_unique_and_labels_lead_somewhere(full: Page) -> None:
    levels = [int(tag[1]) for tag, _ in full.tags if tag in ("h1", "h2", "h3")]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels))
    ids = [attributes["id"] for _, attributes in full.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {s["aria-labelledby"] for s in full.all("section")} <= set(ids)


def test_the_config_on_the_page_is_a_preset(trained: Run, full: Page) -> None:
    yaml = next(words for words in full.words if words.startswith("arch: "))
    assert from_yaml(yaml, "page") == trained.config


# ------------------------------------------------------------------------------ hostile text


def hostile(run: Run, path: Path, text: str) -> Run:
    """A run with `text` wherever text is allowed; nothing of it can be drawn."""
    about = {
        "config": run.about["config"] | {"arch": text, text: text},
        "data": {"source": text, "images": text, "fingerprint": text},
        "starts": [{"time": text, "host": text, "command": [text], "versions": {text: text}}],
    }
    # A name cannot have a slash or a zero, nor the surrogates that stand for no byte.
    name = "".join(c for c in text if c not in "/\0" and not "\ud800" <= c <= "\udc7f")
    name = "".join(c for c in name if not "\udd00" <= c <= "\udfff")
    bad = bare(run, path / name[:80], **about)
    keys = ("protocol", "label", "selection", "n", "value", "low", "random_init")
    bad.add_result(**dict.fromkeys(keys, text), **{text: text})
    bad.add_result(protocol=text, label=text, value=0.5, random_init=0.25, **{text: text})
    (bad.path / "metrics.jsonl").write_text(json.dumps({"step": text, "loss": text, text: text}))
    return bad


@pytest.mark.parametrize("payload", PAYLOADS, ids=lambda text: ascii(text)[1:25])
def test_hostile_text_is_shown_and_adds_no_tag_and_no_attribute(
    trained: Run, tmp_path: Path, payload: str
) -> None:
    harmless = Page(write_report(hostile(trained, tmp_path / "a", "harmless")))
    page = Page(write_report(hostile(trained, tmp_path / "b", payload)))
    assert page.skeleton == harmless.skeleton
    assert len(page.source.splitlines()) == len(harmless.source.splitlines())
    escaped = "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in payload
    )
    # Everywhere: the summary, two results with three columns and details, config, environment.
    assert "".join(page.words).count(escaped) >= 15
    assert {c for c in page.source if not c.isprintable()} == {"\n"}


def test_hostile_text_around_a_whole_run_adds_nothing_to_its_page(
    trained: Run, full: Page, tmp_path: Path
) -> None:
    # Bytes that are not UTF-8 are left to the test above: safetensors cannot open such a path.
    path = tmp_path / "<img src=x onerror=alert(1)>\x1b\u202e"
    shutil.copytree(trained.path, path)
    about = trained.about
    about["data"]["source"] = about["starts"][0]["host"] = "".join(PAYLOADS)
    (path / "run.json").write_text(json.dumps(about))
    page = Page(write_report(Run(path), Pixels()))
    assert page.skeleton == full.skeleton


@pytest.mark.parametrize(
    "about",
    [
        {},
        {"config": 3, "data": "x", "starts": {"a": 1}},
        {"config": [], "data": [], "starts": [1, None, "x", {"versions": 3, "command": "x"}]},
        {"config": {"a": {"b": None}}, "data": {"source": {}, "images": 10**400}, "starts": [{}]},
    ],
    ids=ascii,
)
def test_a_run_json_of_another_shape_still_gives_a_page(tmp_path: Path, about: object) -> None:
    (tmp_path / "run.json").write_text(json.dumps(about))
    for name in ("metrics", "results"):
        lines = ["{}", "[]", "3", '{"step": 1e999, "value": NaN, "low": [], "n": {}}', "{torn"]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    page = Page(write_report(Run(tmp_path)))
    assert "The config in run.json is not valid" in page.text
    assert "No images: the masks are drawn from the config, which cannot be read" in page.text


# ------------------------------------------------------------------------------ what is missing


def test_a_run_that_has_only_begun_has_a_page_that_names_what_is_missing(
    trained: Run, tmp_path: Path
) -> None:
    data = trained.about["data"] | {"source": str(tmp_path / "gone")}
    page = Page(write_report(bare(trained, tmp_path / "begun", data=data)))
    for missing in (
        "No update has been logged yet.",
        "Not evaluated yet : run stopmim eval suite",
        "No evaluation yet: run stopmim eval suite",
        "No curves yet: metrics.jsonl has no line.",
        f"No images: {tmp_path / 'gone'}: no such folder",
        "No checkpoint to look into:",
    ):
        assert missing in page.text
    assert not page.all("svg")
    assert "A vit_micro6 encoder was pretrained by I-JEPA + StoP" in page.text


def test_other_images_than_the_run_began_with_are_not_shown(trained: Run, tmp_path: Path) -> None:
    class Others(Pixels):
        fingerprint = "others"

    page = Page(write_report(bare(trained, tmp_path / "run"), Others()))
    assert "No images: the images found now are not those that the run was trained on" in page.text


def test_the_images_that_run_json_names_are_opened_again(trained: Run, tmp_path: Path) -> None:
    data = {"source": "scenes:16:48", "fingerprint": open_images("scenes:16:48").fingerprint}
    page = Page(write_report(bare(trained, tmp_path / "run", data=data)))
    assert len(page.all("svg")) == PREVIEWS


def test_a_run_without_noise_says_that_its_positions_are_certain(tmp_path: Path) -> None:
    run = pretrain(
        Pixels(),
        tmp_path / "ijepa",
        "tiny_cpu",
        stop_at=1,
        positions={"kind": "sincos"},
        optim={"epochs": 2, "warmup_epochs": 0.5, "batch_size": 16},
        runtime={"workers": 0},
    )
    page = Page(write_report(run))
    assert "The positions of this run are certain" in page.text
    assert "with StoP, A carries the noise" in page.text  # here it does not
    assert "pretrained by I-JEPA on" in page.text
    assert "It has made 1 update, 0.5 of 2 epochs" in page.text


def test_a_folder_that_is_no_run_is_refused(trained: Run, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a run directory"):
        write_report(Run(tmp_path))
    assert os.listdir(tmp_path) == []
    with pytest.raises(CheckpointError, match="gone: not a run directory: no such folder"):
        write_report(trained, others=[Run(tmp_path / "gone")], out=tmp_path / "x.html")
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"not a run directory: run\.json holds no object"):
        write_report(Run(tmp_path))


def test_a_folder_for_the_page_that_is_not_there_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "nodir" / "r.html"
    assert main(["report", str(tmp_path / "gone"), "--out", str(out)]) == 5  # of a run: 4
    assert capsys.readouterr().err == f"stopmim: error: {out.parent}: no such folder\n"


# ------------------------------------------------------------------------------ in a browser


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Which must be there: see tests/browser.py."""
    with Browser(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture
def browser(chromium: Browser, full: Page, trained: Run) -> Browser:
    """Shows the page of the trained run, untouched, whatever the test before it has opened."""
    chromium.view(1200, dark=False)
    chromium.open(trained.path / "report.html")
    chromium.errors.clear()
    return chromium


def picture(browser: Browser, selector: str) -> list[str]:
    """The colours of the patches of an explorer's map."""
    return list(browser.ask(f"[...document.querySelectorAll('{selector}')].map(c => c.style.fill)"))


def test_the_page_is_drawn_within_two_seconds_without_complaint_or_request(
    browser: Browser, trained: Run
) -> None:
    browser.call("Performance.enable", timeDomain="threadTicks")  # however busy the machine is
    browser.requests.clear()
    browser.open(trained.path / "report.html")
    about = {m["name"]: m["value"] for m in browser.call("Performance.getMetrics")["metrics"]}
    assert 0 < about["TaskDuration"] <= 2.0
    assert browser.errors == []
    assert {url.partition(":")[0] for url in browser.requests} <= {"file", "data"}
    assert len({url for url in browser.requests if url.startswith("file:")}) == 1
    pixels = np.asarray(Image.open(io.BytesIO(browser.screenshot())).convert("RGB"))
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 50  # not blank


def test_a_click_on_a_hidden_patch_changes_the_heat_map_and_one_on_a_seen_patch_does_not(
    browser: Browser,
) -> None:
    heat = "#prediction-explorer figure:nth-child(2) [data-patch]"
    cell = '#prediction-explorer figure:nth-child(1) [data-patch="{}"]'
    hidden = browser.ask(
        "[...document.querySelectorAll('#prediction-explorer .hidden')].map(c => c.dataset.patch)"
    )
    seen = browser.ask("document.querySelector('#prediction-explorer .seen').dataset.patch")
    said = "document.getElementById('prediction-said').textContent"
    told = []
    for patch in (hidden[0], hidden[-1]):
        browser.click(cell.format(patch))
        told.append((picture(browser, heat), browser.ask(said)))
    assert told[0][0] != told[1][0]
    assert told[0][1] != told[1][1]
    browser.click(cell.format(seen))
    assert (picture(browser, heat), browser.ask(said)) == told[1]


def test_another_checkpoint_and_another_image_change_the_heat_map(browser: Browser) -> None:
    heat = "#prediction-explorer figure:nth-child(2) [data-patch]"
    before = picture(browser, heat)
    browser.ask("document.getElementById('prediction-step').focus()")
    browser.key("ArrowUp")
    other = picture(browser, heat)
    assert other != before
    browser.click("#prediction-explorer .picks button:nth-child(2)")
    assert picture(browser, heat) != other


def test_the_positions_are_explored_by_clicks_and_by_keys(browser: Browser) -> None:
    maps = "#position-explorer [data-patch]"
    browser.click('#position-explorer figure:nth-child(1) [data-patch="0"]')
    first = picture(browser, maps)
    browser.ask("document.querySelector('#position-explorer .patches').focus()")
    browser.key("ArrowRight")
    assert picture(browser, maps) != first
    assert "row 1, column 2" in browser.ask("document.getElementById('position-said').textContent")


def test_a_curve_tells_values_zooms_and_comes_back(browser: Browser) -> None:
    chart, labels = "document.querySelector('#chart-0 svg')", "#chart-0 text"
    texts = f"[...document.querySelectorAll('{labels}')].map(t => t.textContent).join(' ')"
    whole = browser.ask(texts)
    browser.ask(f"{chart}.scrollIntoView({{block: 'center'}})")
    x, y, wide = browser.ask(
        f"(r => [r.x, r.y + r.height / 2, r.width])({chart}.getBoundingClientRect())"
    )
    browser.mouse("mouseMoved", x + 0.5 * wide, y)
    assert "loss" in browser.ask("document.querySelector('#chart-0 .readout').textContent")
    browser.mouse("mousePressed", x + 0.3 * wide, y)
    browser.mouse("mouseMoved", x + 0.6 * wide, y)
    browser.mouse("mouseReleased", x + 0.6 * wide, y)
    assert browser.ask(texts) != whole
    browser.ask(f"{chart}.focus()")
    browser.key("0")
    assert browser.ask(texts) == whole
    assert browser.errors == []


def test_hostile_text_runs_nothing_in_a_browser(
    trained: Run, browser: Browser, tmp_path: Path
) -> None:
    path = tmp_path / "<img src=x onerror=alert(1)>"
    shutil.copytree(trained.path, path)
    about = trained.about
    about["data"]["source"] = about["starts"][0]["host"] = "".join(PAYLOADS)
    (path / "run.json").write_text(json.dumps(about))
    other = hostile(trained, tmp_path / "other", PAYLOADS[2])
    browser.requests.clear()
    browser.open(write_report(Run(path), Pixels(), others=[other], out=tmp_path / "page.html"))
    assert browser.errors == []
    assert {url.partition(":")[0] for url in browser.requests} <= {"file", "data"}
    assert browser.ask("document.querySelectorAll('[onerror], iframe').length") == 0
    assert "onerror" in browser.ask("document.querySelector('h1').textContent")


def test_images_without_a_label_are_told_apart_from_images_of_another_class(
    trained: Run, browser: Browser, tmp_path: Path
) -> None:
    images = Pixels()
    images.labels = {"class": np.where(np.arange(32) < 12, -1, np.arange(32) % 3)}
    page = write_report(trained, images, out=tmp_path / "page.html")
    said = "Over the 20 images of known class (12 others have no frame, and are grey on the map);"
    assert said in Page(page).text
    browser.open(page)
    legend = browser.ask("[...document.querySelectorAll('.kinds > span')].map(e => e.textContent)")
    assert legend == [*Pixels.classes, "no label"]
    colour = "getComputedStyle(document.querySelector('{}')).{}"
    key = browser.ask(colour.format(".kinds .unknown", "backgroundColor"))
    assert key == browser.ask(colour.format("circle.unknown", "fill"))


# Elements that reach beyond the window, or whose text does not fit; code may scroll.
CUT_OFF = """(() => {
  const wide = document.documentElement.clientWidth, seen = [];
  for (const e of document.body.querySelectorAll("*:not(script, pre)")) {
    const box = e.getBoundingClientRect();
    const out = box.width && box.height && (box.left < -0.5 || box.right > wide + 0.5);
    const cut = e instanceof HTMLElement && e.scrollWidth > e.clientWidth + 1
      && getComputedStyle(e).overflowX !== "visible" && getComputedStyle(e).clipPath === "none";
    if (out || cut) seen.push(`${e.tagName}.${e.className}: ${e.textContent.slice(0, 40)}`);
  }
  return document.documentElement.scrollWidth > wide ? ["the page", ...seen] : seen;
})()"""


def test_nothing_is_cut_off_on_any_screen_in_light_and_dark(
    trained: Run, browser: Browser, tmp_path: Path
) -> None:
    long = Run(shutil.copytree(trained.path, tmp_path / "a_rather_long_name_of_a_run_with_seed_3"))
    page = write_report(trained, Pixels(), others=[long], out=tmp_path / "both.html")
    tops = (
        "[...document.querySelectorAll('{}')].map(e => Math.round(e.getBoundingClientRect().top))"
    )
    papers = set()
    for wide, dark in itertools.product((1400, 768, 390), (False, True)):
        browser.view(wide, dark=dark)
        browser.open(page)
        browser.ask("document.querySelectorAll('details').forEach(e => { e.open = true; })")
        assert browser.ask(CUT_OFF) == [], (wide, dark)
        assert browser.errors == [], (wide, dark)
        masked = browser.ask(tops.format(".grid.images .drawing"))
        assert masked.count(masked[0]) == {1400: 4, 768: 3, 390: 2}[wide]  # images of a row align
        for name, columns in (("prediction", 2), ("position", 3)):
            aligned = browser.ask(tops.format(f"#{name}-explorer .pair svg"))
            assert aligned == [aligned[0]] * columns, (name, wide)
        papers.add(browser.ask("getComputedStyle(document.documentElement).backgroundColor"))
    assert len(papers) == 2


def test_every_number_of_a_result_is_named_and_in_sight_on_a_telephone(browser: Browser) -> None:
    browser.view(390, dark=False)
    named = browser.ask(
        "[...document.querySelectorAll('[aria-labelledby=evaluation] tbody tr:first-child td')]"
        ".map(e => [getComputedStyle(e, '::before').content, e.getBoundingClientRect().right])"
    )
    titles = {title for title, _ in named}
    assert {'"Value"', '"Random init"', '"Difference"'} <= titles
    assert max(right for _, right in named) <= 390


def test_neighbours_are_on_the_page_with_their_classes(full: Page, browser: Browser) -> None:
    assert "among 32 training images" in full.text
    assert re.search(r"class \d+ % \d+ % 31 %", full.text)  # 11, 11 and 10 images
    data = json.loads(next(text for text in full.scripts if text.startswith("{")))["neighbours"]
    assert [e["name"] for e in data["encoders"]] == ["before training", "after training"]
    assert all(picture.startswith("data:image/jpeg;base64,") for picture in data["pictures"])
    assert sum(map(len, data["pictures"])) < 4_000_000 * 32 / 300  # in the page of 300 images
    images = "[...document.querySelectorAll('#gallery img')]"
    assert browser.ask(f"{images}.every(e => e.complete && e.naturalWidth)")  # also when printed
    cards = browser.ask("document.querySelectorAll('#gallery figure').length")
    framed = browser.ask("document.querySelectorAll('#gallery .same').length")
    of, near = data["kinds"][0]["of"], [e["nearest"] for e in data["encoders"]]
    want = sum(of[i] == of[q] for q in data["queries"] for rows in near for i in rows[q])
    assert (cards, framed) == (8, want)


def test_the_map_shows_the_image_under_the_pointer_and_a_click_its_neighbours(
    browser: Browser,
) -> None:
    dot, said = "#maps figure:nth-child(2) circle.kind-1", "#map-said"
    text = f"document.querySelector('{said}').textContent"
    shown = "document.querySelector('#maps image').getAttribute('href')"
    own = "document.querySelector('#chosen .query').getAttribute('src')"
    before = browser.ask(own)
    browser.ask(f"document.querySelector('{dot}').scrollIntoView({{block: 'center'}})")
    x, y = browser.ask(
        f"(r => [r.x + r.width / 2, r.y + r.height / 2])"
        f"(document.querySelector('{dot}').getBoundingClientRect())"
    )
    browser.mouse("mouseMoved", x, y)
    assert browser.ask(text).endswith("class: dogs")
    assert browser.ask(shown) != before == browser.ask(own)
    browser.mouse("mousePressed", x, y)
    browser.mouse("mouseReleased", x, y)
    assert browser.ask(own) == browser.ask(shown)
    assert browser.ask("document.querySelectorAll('#maps .ring').length") == 2 * (1 + 6)
    browser.ask("document.querySelector('#maps .places').focus()")
    chosen = browser.ask(own)
    browser.key("ArrowRight")
    assert browser.ask(own) != chosen
    assert browser.errors == []


def test_captions_name_the_loss_of_the_run_and_what_greys_mean(full: Page, tmp_path: Path) -> None:
    assert "smooth L1 between predictions and targets" in full.text
    assert "plain grey: neither seen nor predicted" in full.text
    pixels = pretrain(NoiseImages(), tmp_path / "mae", tiny_mae(), stop_at=1)
    text = Page(write_report(pixels)).text
    assert "squared error between predictions and targets" in text
    assert "smooth L1" not in text


def test_noise_that_changes_nothing_is_said_to_be_off(trained: Run, full: Page) -> None:
    off = {}
    for sigma in (1e-6, 25.0):
        model = build(configure(tiny(positions={"sigma": sigma})))
        off[sigma] = similarity.of_model(model, 0).practically_off
    assert off == {1e-6: True, 25.0: False}
    own = similarity.of_model(trained.model(), trained.config.seed).practically_off
    assert ("The noise is practically off" in full.text) == own


def test_several_runs_are_on_one_page(trained: Run, full: Page, tmp_path: Path) -> None:
    page = Page(write_report(trained, Pixels(), others=[trained], out=tmp_path / "both.html"))
    assert "Compared with other runs" in page.text
    data = json.loads(next(text for text in page.scripts if text.startswith("{")))
    # Not -1, a reference: that one was trained on other images.
    assert {line["run"] for line in data["charts"][0]["lines"]} == {0, 1}
    assert "Compared with other runs" not in full.text


def test_an_evaluation_that_was_repeated_is_one_line(tmp_path: Path) -> None:
    run = pretrain(NoiseImages(), tmp_path / "run", tiny(), stop_at=1)
    for n in (10, 10, 20):
        run.add_result(name="accuracy", protocol="knn", label="count", value=0.5, n=n)
    page = write_report(run, NoiseImages()).read_text()
    assert page.count('<th scope="row">knn</th>') == 2


def test_data_branch_and_step_are_named_where_a_run_has_results_of_more_than_one(
    tmp_path: Path,
) -> None:
    run = pretrain(NoiseImages(), tmp_path / "run", tiny(), stop_at=1)
    usual: dict[str, Any] = {"name": "accuracy", "protocol": "knn", "label": "count"}
    usual |= {"value": 0.5, "random_init": 0.25}
    facts: dict[str, Any] = {"test_data": "birds (9 images)", "branch": "target", "step": 5}
    film = usual | facts | {"protocol": "tracking", "videos": "films"}

    def lines() -> list[str]:
        page = Page(write_report(run, NoiseImages())).text
        return re.findall(r"count ((?:on|context|target|step|-).*?) 50.0 %", page)

    run.add_result(**usual, **facts)
    run.add_result(**film)
    text = Page(write_report(run, NoiseImages())).text
    assert not any(word in text for word in ("birds", "films", "step 5"))
    run.add_result(**usual, **facts | {"test_data": "bees (9 images)"})
    assert lines() == ["on birds (9 images)", "on bees (9 images)"]
    run.add_result(**usual, **facts | {"branch": "context", "step": 7})
    assert lines() == [
        "on birds (9 images), target encoder, step 5",
        "target encoder, step 5 accuracy",
        "on bees (9 images), target encoder, step 5",
        "on birds (9 images), context encoder, step 7",
    ]
    # Which is nothing to be proud of.
    decay = {"name": "J decay", "value": 0.9, "random_init": 0.1, "low": 0.8, "high": 1.0}
    assert as_text(in_percent(film | decay))["colour"] == "down"
    # A loss below 0 is a share as well.
    gain = as_text(in_percent(film | decay | {"value": -0.0022, "low": -0.1}))
    assert (gain["value"], gain["interval"]) == ("-0.2 %", "-10.0 to 100.0")
    assert gain["difference"].startswith("-10.2")
