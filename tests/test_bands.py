"""Twelve bands of 16 bits through the product: train, diagnose, evaluate."""

from pathlib import Path
from typing import Any

import pytest

from stopmim import Run
from stopmim.cli import main

THREE = "channels:red,green,blue:"


def trained(source: str, out: Path) -> dict[str, Any]:
    """The result of a linear probe for the distance, after the commands that a person would use."""
    words = ["--preset", "tiny_cpu", "--optim.epochs", "8"]
    assert main(["pretrain", f"{source}:4096:48", "--out", str(out), *words]) == 0
    assert main(["doctor", str(out)]) == 0
    data = ["--data", f"{source}:1024:48:3", "--label", "distance", "--random-inits", "2"]
    assert main(["eval", "suite", str(out), *data]) == 0
    kinds = [x for x in Run(out).results if (x["protocol"], x["label"]) == ("linear", "distance")]
    return kinds[0]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_bands_tell_more_than_three_and_than_an_untrained_network(tmp_path: Path) -> None:
    every = trained("bands", tmp_path / "all")
    colours = trained(f"{THREE}bands", tmp_path / "colours")
    assert every["value"] > every["random_init"] + 3
    assert every["value"] > colours["value"] + 3
