"""One run of an ablation: trained, measured, its answers kept beside its checkpoints.

``python -m stopmim.ablations.trial TRIAL.json`` does it, or goes on with it; jobs.py starts such
processes. A trial that was killed at any moment and is done again gives the same answers.
"""

import dataclasses
import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stopmim.ablations.table import Asks
from stopmim.base.errors import DataError, NoPartError, RunInUseError, UserError
from stopmim.base.faults import faultpoint
from stopmim.base.files import append_jsonl, write_whole
from stopmim.config.schema import Config
from stopmim.data.check import look_at
from stopmim.data.images import Images
from stopmim.data.skip import both_without_skipped
from stopmim.data.sources.open import open_images
from stopmim.data.sources.scenes import VERSION
from stopmim.data.stamps import of_files
from stopmim.data.videos import Davis, Video, open_videos
from stopmim.evals import cache, command
from stopmim.evals.inputs import choose_labels, open_at
from stopmim.evals.recipes import TASKS
from stopmim.runs.run import Run
from stopmim.train.loop import pretrain

FIT, TEST = 2048, 4096  # scenes that classifiers are fitted to and tested on, if nothing is given
LABELS = {"clevr_count": ("count",), "clevr_dist": ("distance",)}  # of published recipes
LOOKED = 10_000  # images to evaluate on, up to which all are read before anything trains
RENDERER = f"scenes-v{VERSION}"  # all that a name of scenes, or videos of them, does not say
PATIENCE = 60.0  # seconds that a process which lost its parent has to save and leave

Answer = dict[str, Any]  # a line of results.jsonl


@dataclass(frozen=True)
class Question:
    """What a trained encoder is asked: protocols of `evals`, and the options of its command."""

    protocols: tuple[str, ...]
    request: dict[str, Any]
    on: str = ""  # the data set, where there are several
    content: str = ""  # changes with the data and the lists that the request has only names of


@dataclass(frozen=True)
class Trial:
    path: Path  # run directory
    data: str
    config: Config | None  # None: nothing is trained, `encoder` is a file
    questions: tuple[Question, ...]
    encoder: str = ""

    @property
    def kept(self) -> Path:
        """Where the answers to these questions are, or will be."""
        asked = json.dumps([dataclasses.asdict(q) for q in self.questions], sort_keys=True)
        return self.path / f"answers-{hashlib.sha256(asked.encode()).hexdigest()[:12]}.json"

    def answers(self) -> list[Answer] | None:
        """What was found; None before it was."""
        try:
            return json.loads(self.kept.read_bytes())
        except (OSError, ValueError):
            return None

    def as_json(self) -> str:
        config = None if self.config is None else self.config.model_dump(mode="json")
        questions = [dataclasses.asdict(q) for q in self.questions]
        tree = {"path": str(self.path), "data": self.data, "encoder": self.encoder}
        return json.dumps(tree | {"config": config, "questions": questions}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Trial":
        tree = json.loads(text)
        config = tree["config"] and Config.model_validate_json(json.dumps(tree["config"]))
        questions = tuple(
            Question(**q | {"protocols": tuple(q["protocols"])}) for q in tree["questions"]
        )
        return cls(Path(tree["path"]), tree["data"], config, questions, tree["encoder"])


def identity(config: Config, data: str) -> str:
    """Equal for equal runs: what changes nothing but rounding, and the table, are not in it."""
    tree = config.model_dump(mode="json", exclude={"runtime"})
    text = json.dumps([tree, data], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def questions(
    asks: Asks,
    data: str,
    size: int,
    evals: Sequence[str],
    few: str,
    video_size: int | None = None,
    skip: str | None = None,
) -> tuple[Question, ...]:
    """What the encoders of a table are asked; everything that it needs is there, or a UserError.

    Args:
        data: what they are pretrained on; asked about too, unless `evals` names something else.
            Of scenes the questions are those that CLEVR stands for: how many, how near.
        size: edge of the images that they are made for.
        evals: ``[NAME=]DATA``; the name is that of a published recipe, as cifar100.
        few: labelled images per class, or a file with their names.
        video_size: edge of the shorter side of the frames of videos; None: as published.
        skip: a list of images to leave out of `data`, here as in pretraining.
    """
    given = [_named(text) for text in evals]
    scenes = data.split(":")[0] == "scenes"
    if asks == "tracking":
        if not given and not scenes:
            raise UserError("ablate tracking: name a folder of DAVIS, as --eval DAVIS")
        videos = given[0][1] if given else "scenes"
        seen, asked = _of_videos(open_videos(videos)), {"videos": videos, "video_size": video_size}
        return (Question(("tracking",), asked, content=seen),)
    chosen = b""
    if few.isdecimal() and int(few):
        number: dict[str, Any] = {"per_class": int(few)}
    elif Path(few).is_file():
        number, chosen = {"list": few}, Path(few).read_bytes()
    else:
        raise UserError(f"--few {few}: neither a number of images per class nor a list of them")
    protocols, more = {
        "few labels": (("lowshot", "linear") if scenes else ("lowshot", "knn", "linear"), "last"),
        "all labels": (("lowshot", "linear"), "both"),
        "transfer": (("linear",), "both"),
        "finetune": (("finetune",), "last"),
        "quick": (("lowshot", "knn"), "last"),
        "everything": (("lowshot", "knn", "linear"), "both"),
    }[asks]
    found = []
    for name, source in given or [("", "" if scenes else data)]:
        request: dict[str, Any] = {"recipe": name or "auto", "layers": more} | number
        if not source:
            request |= {"train": f"scenes:{FIT}:{size}:3", "test": f"scenes:{TEST}:{size}:4"}
        else:
            request["data"] = source
        if not source or source.split(":")[0] == "scenes":
            request["label"] = ["count", "distance"]
            content = [RENDERER]
        else:
            request["label"] = list(LABELS.get(name, ()))
            if skip is not None and source == data:
                request["skip"] = skip
            try:
                parts = open_images(source, "train"), open_images(source, "test")
            except NoPartError:
                raise DataError(
                    f"{source}: not in a part to fit on and one to test on, as train/ and val/; "
                    f"name data that are, by --eval DATA"
                ) from None
            parts = both_without_skipped(*parts, request.get("skip"))
            labels = choose_labels(*parts, request["label"])
            _read_all(source, parts, may_skip=source == data)
            content = [cache.of_images(images, labels) for images in parts]  # less those skipped
        on = name if len(given) > 1 else ""
        found.append(Question(protocols, request, on, cache.key(*content, chosen)))
    return tuple(found)


def _of_videos(videos: Sequence[Video]) -> str:
    if isinstance(videos, Davis):
        names = [(video.name, [video.stem(i) for i in range(len(video))]) for video in videos]
        return cache.key(videos.year, names, of_files(videos.files()))
    return cache.key(RENDERER)


def _read_all(source: str, parts: tuple[Images, Images], *, may_skip: bool) -> None:
    """A broken image, if there is one, is found now and not when all rows are trained."""
    total = sum(map(len, parts))
    if total > LOOKED:
        return
    bad = [
        f"{images.name(i)}: {found.reason}"
        for images in parts
        for i, found in enumerate(look_at(images, range(len(images))))
        if found.reason is not None
    ]
    if bad:
        way_out = ", or leave them out with --data.skip FILE, see stopmim check --fix-list"
        raise DataError(
            f"{source}: {len(bad)} of {total} images to evaluate on cannot be read, first {bad[0]}"
            f"; mend or remove them{way_out if may_skip else ''}"
        )


def _named(text: str) -> tuple[str, str]:
    name, equals, source = text.partition("=")
    return (name, source) if equals and name in TASKS else ("", text)


def perform(trial: Trial) -> list[Answer]:
    """Trains what is not trained yet, and asks what is not answered yet."""
    if (known := trial.answers()) is not None:
        return known
    if trial.config is not None:
        _train(trial, trial.config)
    else:
        trial.path.mkdir(parents=True, exist_ok=True)
    device = "auto" if trial.config is None else trial.config.runtime.device
    name = trial.encoder or str(Run(trial.path).checkpoint)
    found = [answer for q in trial.questions for answer in ask(name, q, device)]
    for answer in found:
        append_jsonl(trial.path / "results.jsonl", answer)
    faultpoint("trial.asked")
    write_whole(trial.kept, json.dumps(found, indent=1))
    return found


def ask(name: str, question: Question, device: str = "auto") -> list[Answer]:
    """The answers of the encoder called `name`."""
    options = question.request | {"device": device}
    options |= {key: Path(options[key]) for key in ("list", "skip") if key in options}
    request = command.Request(**options)
    encoder, step = open_at(name, request.branch)
    match question.protocols:
        case ("tracking",):
            results, facts = command.tracked(name, encoder, request)
        case ("finetune",):
            results, facts = command.tuned(name, encoder, request, "one-percent", {})
        case protocols:
            results, facts = command.asked(name, encoder, request, protocols)
    facts["step"] = step
    return [facts | result.as_dict() | {"on": question.on} for result in results]


def _train(trial: Trial, config: Config) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            pretrain(trial.data, trial.path, config)
            return
        except RunInUseError:
            # Of an ablation that was killed a moment ago, the process of this run may still save.
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


# ------------------------------------------------------------------------------ as a process


def main(words: Sequence[str]) -> int:
    """``[--watched] TRIAL.json``; watched: ends itself, having saved, when its stdin is closed."""
    *options, file = words
    if options == ["--watched"]:
        threading.Thread(target=_leave_with_parent, daemon=True).start()
    try:
        perform(Trial.from_json(Path(file).read_text(encoding="utf-8")))
    except UserError as error:
        print(f"stopmim: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _leave_with_parent() -> None:
    # Not sys.stdin: a thread that waits in there would keep the process from ending.
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(PATIENCE)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
