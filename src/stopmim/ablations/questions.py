"""Questions for the encoders of a table, with all data opened and checked beforehand."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from stopmim.ablations.table import Asks
from stopmim.base.errors import DataError, NoPartError, UserError
from stopmim.base.files import read_regular
from stopmim.data.checks.facts import inspect_images
from stopmim.data.images import stamp_files
from stopmim.data.skip import both_without_skipped
from stopmim.data.sources.open import open_images
from stopmim.data.sources.scenes import VERSION
from stopmim.data.subset import check_named, without_loose
from stopmim.data.videos import Davis, open_videos
from stopmim.evals import cache
from stopmim.evals.inputs import choose_labels
from stopmim.evals.protocols import PROTOCOLS, from_options
from stopmim.evals.recipes import TASKS

FIT, TEST = 2048, 4096  # scenes to fit classifiers on and to test them on, by default
MAX_CHECKED = 10_000  # most images of which all are decoded before anything trains
RENDERER = f"scenes-v{VERSION}"  # content of scenes and their videos, beyond their name
SCENE_LABELS = ["count", "distance"]  # the questions of CLEVR
LABELS = {"clevr_count": ["count"], "clevr_dist": ["distance"]}  # of published recipes
ASKED: dict[Asks, tuple[tuple[str, ...], str]] = {  # and layers of linear classifiers
    "few labels": (("lowshot", "knn", "linear"), "last"),
    "all labels": (("lowshot", "linear"), "best"),
    "transfer": (("linear",), "best"),
    "finetune": (("finetune",), "last"),
    "quick": (("lowshot", "knn"), "last"),
    "everything": (("lowshot", "knn", "linear"), "both"),
}
FEW_LABELS = {"lowshot", "finetune"}  # protocols that a list of images is for


@dataclass(frozen=True)
class Question:
    """Protocols of `evals`, and the options to run them with."""

    protocols: tuple[str, ...]
    request: dict[str, Any]
    on: str = ""  # name of the data set, if there are several
    content: str = ""  # hash of the data and lists that the request only names, and of the code


def questions(
    asks: Asks,
    data: str,
    size: int,
    evals: Sequence[str],
    few: str,
    video_size: int | None = None,
    skip: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> tuple[Question, ...]:
    """The questions for the encoders of a table; raises UserError if anything is missing.

    Args:
        data: pretraining data; also evaluated on, unless `evals` names other data. On scenes the
            questions are those of CLEVR: how many objects, and how far away.
        size: image size of the encoders.
        evals: ``[NAME=]DATA``, where the name is a published recipe, as cifar100. This, `few` and
            `video_size` are options of `Ablation`. Columns of several are told apart by recipe, or
            by the name of the data.
        skip: list of images of `data` to ignore, as in pretraining.
        options: options of the protocols that differ from their defaults, as selection or views.
    """
    refuse_without_effect(asks, options or {})
    named = [_recipe_and_source(text) for text in evals]
    scenes = is_scenes(data)
    if asks == "tracking":
        if len(named) > 1 or not (named or scenes):
            raise UserError("ablate tracking: name one folder of DAVIS, as --eval DAVIS")
        return (_about_videos(named[0][1] if named else "scenes", video_size),)
    protocols, layers = ASKED[asks]
    if asks == "few labels" and scenes:
        protocols = ("lowshot", "linear")
    chosen = b""
    if re.fullmatch("0*[1-9][0-9]{,8}", few):
        labelled: dict[str, Any] = {"per_class": int(few)}
    elif os.path.isfile(few):
        labelled, chosen = {"list": few}, read_regular(few)
    else:
        raise UserError(f"--few {few}: neither a number of images per class nor a list of them")
    found = list[Question]()
    for recipe, source in named or [("", "" if scenes else data)]:
        on = (recipe or Path(source).stem) if len(named) > 1 else ""
        if on in [other.on for other in found]:  # as columns of one name, the last would win
            raise UserError(f"--eval: two data sets called {on}: rename one, or use two commands")
        request = {"recipe": recipe or "auto", "layers": layers} | labelled | dict(options or {})
        if not source:
            request |= {"train": f"scenes:{FIT}:{size}:3", "test": f"scenes:{TEST}:{size}:4"}
        else:
            request["data"] = source
        if not source or is_scenes(source):
            request["label"] = SCENE_LABELS
            content = [RENDERER]
        else:
            request["label"] = LABELS.get(recipe, [])
            if skip is not None and source == data:
                request["skip"] = skip
            content = _checked(protocols, request, may_skip=source == data)
        found.append(Question(protocols, request, on, _hash(*content, chosen)))
    return tuple(found)


def refuse_without_effect(asks: Asks, options: Mapping[str, Any]) -> None:
    """Raises UserError for an option that no protocol of the table has, or for a wrong value."""
    asked = ASKED[asks][0] if asks in ASKED else (asks,)
    for option in options:
        having = [p.name for p in PROTOCOLS if option in (f.name for f in fields(p))]  # type: ignore[arg-type]
        if not set(having) & set(asked):
            raise UserError(
                f"--{option.replace('_', '-')}: has no effect: it is an option of "
                f"{', '.join(having) or 'no protocol'}, and this table is evaluated by "
                f"{', '.join(asked)}"
            )
    from_options([p for p in PROTOCOLS if p.name in asked], options)  # checks values


def is_scenes(source: str) -> bool:
    return source.split(":")[0] == "scenes"


def _recipe_and_source(text: str) -> tuple[str, str]:
    name, equals, source = text.partition("=")
    return (name, source) if equals and name in TASKS else ("", text)


def _about_videos(source: str, video_size: int | None) -> Question:
    videos = open_videos(source)
    content: list[object] = [RENDERER]
    if isinstance(videos, Davis):
        names = [(video.name, [video.stem(i) for i in range(len(video))]) for video in videos]
        content = [videos.year, names, stamp_files(videos.files())]
    request = {"videos": source, "video_size": video_size}
    return Question(("tracking",), request, content=_hash(*content))


def _hash(*content: object) -> str:
    """Hash of `content` and the evaluation code: only rows under the same code are comparable."""
    return cache.key(*content, cache.of_code(*cache.ANSWERS))


def _checked(protocols: Sequence[str], request: dict[str, Any], *, may_skip: bool) -> list[str]:
    """Hashes of both parts of the data, after decoding every image of small data.

    A broken image or a wrong list ends an evaluation: better now than after all rows have trained.
    """
    source = request["data"]
    try:
        parts = open_images(source, "train"), open_images(source, "test")
    except NoPartError:
        raise DataError(
            f"{source}: has no separate training and test splits, such as train/ and val/; name "
            f"data that has both with --eval DATA"
        ) from None
    train, test = both_without_skipped(*parts, request.get("skip"))
    parts = without_loose(train), without_loose(test)
    for name in request["label"]:  # of the recipe: there is no such option here
        if name not in parts[0].labels:
            recipe, known = request["recipe"], ", ".join(parts[0].labels) or "no label"
            raise DataError(
                f"{source}: {recipe} is about the label {name}, and there is {known}; name data "
                f"that has it, or leave {recipe}= out"
            )
    labels = choose_labels(*parts, request["label"])
    if "list" in request and not FEW_LABELS.isdisjoint(protocols):
        check_named(parts[0], Path(request["list"]), labels)
    total = sum(map(len, parts))
    bad = [
        f"{images.name(i)}: {reason}"
        for images in (parts if total <= MAX_CHECKED else ())
        for i, reason in inspect_images(images, range(len(images))).bad
    ]
    if bad:
        way_out = ", or skip them with --data.skip FILE, see stopmim check --fix-list"
        raise DataError(
            f"{source}: {len(bad)} of {total} images to evaluate on cannot be read, first {bad[0]}"
            f"; fix or remove them{way_out if may_skip else ''}"
        )
    return [cache.of_images(images, labels) for images in parts]
