"""What docs/encoders.md says of public encoders that can be computed or looked up, is so."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from stopmim.method.encoder import VisionTransformer
from stopmim.weights.formats.data2vec import RelativeTransformer

PAGE = (Path(__file__).parents[1] / "docs" / "encoders.md").read_text()
PROJECTS = ("StoP", "I-JEPA", "MAE", "DINO", "iBOT", "data2vec")


class Listed(NamedTuple):
    project: str
    file: str
    address: str
    arch: str  # vit_b16
    pixels: int
    megabytes: int
    size: str
    checksum: str


def listed() -> Iterator[Listed]:
    for section in PAGE.split("\n## ")[1:]:
        project = section.splitlines()[0]
        for row in re.findall(r"^\| (\[.*) \|$", section, re.M):
            first, network, *_, encoder, size, checksum = row.split(" | ")
            file, address = re.fullmatch(r"\[(.*)\]\((.*)\)", first).groups()  # type: ignore[union-attr]
            kind, patch, *pixels = re.findall(r"ViT-(\w)/(\d+)(?:, (\d+) px)?", network)[0]
            megabytes = int(encoder.removesuffix(" MB").replace(",", ""))
            pixels = int(pixels[0] or 224)
            arch = f"vit_{kind.lower()}{patch}"
            yield Listed(project, file, address, arch, pixels, megabytes, size, checksum)


def test_every_project_is_listed_with_its_files_and_a_command_for_one() -> None:
    assert tuple(dict.fromkeys(one.project for one in listed())) == PROJECTS
    for project in PROJECTS:
        section = PAGE.split(f"\n## {project}\n")[1].split("\n## ")[0]
        addresses = {one.address for one in listed() if one.project == project}
        fetched = re.findall(r"^curl -L(?:O| -o \S+) (\S+)$", section, re.M)
        assert fetched
        assert set(fetched) <= addresses
    for one in listed():
        assert one.address.endswith(one.file), one.file


@cache
def encoder_bytes(arch: str, pixels: int, relative: bool, token: bool) -> int:
    """Of all tensors of an encoder, in float32."""
    with torch.device("meta"):
        encoder: Any = VisionTransformer.from_arch(arch, pixels, token)
        if relative:
            sizes = encoder.side, encoder.patch, encoder.width, len(encoder.blocks), encoder.heads
            encoder = RelativeTransformer(*sizes, 4 * encoder.width)
    return 4 * sum(value.numel() for value in encoder.state_dict().values())


@pytest.mark.parametrize("one", list(listed()), ids=lambda one: f"{one.project} {one.file}")
def test_the_size_of_an_encoder_is_that_of_its_weights(one: Listed) -> None:
    token = one.project not in ("StoP", "I-JEPA")
    size = encoder_bytes(one.arch, one.pixels, one.project == "data2vec", token)
    assert one.megabytes == round(size / 1e6)
    if found := re.fullmatch(r"([\d,]+) bytes", one.size):  # of the encoder alone, and a header
        assert 0 < int(found[1].replace(",", "")) - size < 300_000
    else:
        assert one.size in ("unknown", "10.36 GB")


def test_names_of_timm_are_those_of_timm_and_of_the_same_files(timm: Any) -> None:
    section = PAGE.split("\n## By name")[1]
    names = set(re.findall(r"`(vit_\w+\.\w+)`", section)) | set(re.findall(r"timm:(\S+)", section))
    addresses = {one.address for one in listed()}
    assert len(names) == 11
    for name in names:
        assert timm.get_pretrained_cfg(name).url in addresses, name
