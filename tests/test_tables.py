"""The computed tables of the pages are those of now, and what stands beside them is true."""

import re
import shlex

import pytest

import tables
from stopmim.cli import main
from stopmim.config import Config, flatten
from stopmim.presets import PRESETS

CONFIGURE = (tables.DOCS / "configure.md").read_text()
REFUSED = [
    (match[1], match[2]) for match in re.finditer(r"^\| `(--.*?)` \| `(.*)` \|$", CONFIGURE, re.M)
]


@pytest.mark.parametrize("page", tables.PAGES)
def test_the_tables_of_a_page_are_not_stale(page: str) -> None:
    assert set(tables.names(page)) == set(tables.PAGES[page]())
    assert tables.filled(page) == (tables.DOCS / page).read_text(), "run `make tables`"


def test_every_key_is_named_with_a_meaning() -> None:
    for key, _ in flatten(Config().model_dump(mode="json")):
        row = re.search(rf"^\| `{re.escape(key)}` \| `.+` \| .+ \| (.*) \|$", CONFIGURE, re.M)
        assert row, key
        assert row[1].strip(), f"{key} has no text below it in config.py"


def test_what_the_page_says_is_refused_is_refused_in_these_words(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert len(REFUSED) > 5
    for options, answer in REFUSED:
        assert main(["pretrain", "scenes", "--dry-run", *shlex.split(options)]) == 2
        assert capsys.readouterr().err == f"stopmim: error: config: {answer}\n"


@pytest.mark.parametrize("arch", ["vit_b16", "vit_l16"])
def test_operations_by_weights_and_tokens_are_those_torch_counted(arch: str) -> None:
    one = tables.cost(arch)
    (counted, *_) = tables.measured(f"step_{arch}_nvidia-h200")
    ours = tables.operations(arch, one.encoder, one.predictor) / 1e9
    assert ours == pytest.approx(counted["gflop_per_image"], rel=0.02)


def test_memory_by_features_carries_over_from_one_size_to_the_next() -> None:
    """What ViT-H is computed with: ViT-L from the bytes per feature of ViT-B."""
    small, large = (tables.bytes_per_feature(tables.cost(arch)) for arch in ("vit_b16", "vit_l16"))
    assert small == pytest.approx(large, rel=0.05)


def test_the_hours_in_the_docstrings_of_presets_are_those_of_the_benchmarks() -> None:
    found = 0
    for name, preset in PRESETS.items():
        if said := re.search(r"Cost: (?:about |more than )?(\d+) hours", preset.__doc__ or ""):
            assert float(said[1]) == pytest.approx(tables.hours(name), rel=0.03), name
            found += 1
    assert found == 16
