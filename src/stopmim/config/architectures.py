"""The sizes a Vision Transformer comes in. A name is ``vit_<size><patch>``: ``vit_b16``."""

import re
from typing import NamedTuple

from stopmim.base.errors import UserError


class Size(NamedTuple):
    width: int
    depth: int
    heads: int
    mlp_ratio: float = 4.0
    predictor_depth: int = 6


# I-JEPA and StoP: predictor depth 6 (B), 12 (L, H), 16 (g); predictor heads = encoder heads.
SIZES = {
    "micro": Size(96, 4, 3, predictor_depth=2),  # for CPUs: the demo and the tests
    "ti": Size(192, 12, 3),
    "s": Size(384, 12, 6),
    "b": Size(768, 12, 12),
    "l": Size(1024, 24, 16, predictor_depth=12),
    "h": Size(1280, 32, 16, predictor_depth=12),
    "g": Size(1408, 40, 16, mlp_ratio=48 / 11, predictor_depth=16),
}


def parse_arch(name: str) -> tuple[Size, int]:
    """``"vit_b16"`` -> (its Size, patch 16)."""
    found = re.fullmatch(r"vit_([a-z]+)([1-9]\d{0,3})", name)
    if not found or found[1] not in SIZES:
        raise UserError(
            f"unknown arch {name!r}: expected vit_<size><patch>, size one of {', '.join(SIZES)}"
        )
    return SIZES[found[1]], int(found[2])


def printed(arch: str) -> str:
    """An architecture as papers print it: vit_b16 is ViT-B/16."""
    _, patch = parse_arch(arch)
    return f"ViT-{arch.removeprefix('vit_').removesuffix(str(patch)).capitalize()}/{patch}"
