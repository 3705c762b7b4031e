"""The protocols, one file each. A new one costs its file and its line in PROTOCOLS."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from stopmim.evals.protocols.finetune import Finetune as Finetune
from stopmim.evals.protocols.knn import Knn as Knn
from stopmim.evals.protocols.linear import Linear as Linear
from stopmim.evals.protocols.lowshot import Lowshot as Lowshot
from stopmim.evals.protocols.protocol import Protocol as Protocol
from stopmim.evals.protocols.rankme import RankMe as RankMe
from stopmim.evals.protocols.tracking import VideoTracking as VideoTracking
from stopmim.evals.request import ImageRequest, Request

PROTOCOLS: tuple[type[Protocol], ...] = (Knn, Linear, Lowshot, RankMe, Finetune, VideoTracking)
# Protocols with a frozen encoder, and the ones among them with an answer for every test image.
SUITE = tuple(kind for kind in PROTOCOLS if kind.in_suite)
IMAGE_BY_IMAGE = tuple(kind for kind in SUITE if kind.needs == "labels")
T = TypeVar("T")


def request_for(kinds: Sequence[type[Protocol]]) -> type[Request]:
    """The shared options that `kinds` take: tracking alone needs no images."""
    return Request if all(kind.needs == "videos" for kind in kinds) else ImageRequest


def from_options(
    kinds: Sequence[type[Protocol]], options: Mapping[str, Any]
) -> tuple[list[Protocol], Request]:
    """Protocols and request, each with the fields it finds in `options`; other keys are ignored."""
    return [_filled(kind, options) for kind in kinds], _filled(request_for(kinds), options)


def _filled(kind: type[T], options: Mapping[str, Any]) -> T:
    names = [field.name for field in fields(kind) if field.name in options]  # type: ignore[arg-type]
    return kind(**{name: options[name] for name in names})
