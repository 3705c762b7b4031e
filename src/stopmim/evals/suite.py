"""Measures an encoder by several protocols, beside untrained networks of the same architecture."""

import dataclasses
import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache as once
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from stopmim.base.console import QUIET, busy, duration, say, warn
from stopmim.base.errors import DataError, UserError
from stopmim.base.faults import faultpoint
from stopmim.base.files import read_regular
from stopmim.data.images import Images
from stopmim.data.sources.scenes import Scenes
from stopmim.evals import cache
from stopmim.evals.inputs import Inputs, open_at, open_pair
from stopmim.evals.paired import beside_random_init
from stopmim.evals.protocols import SUITE
from stopmim.evals.protocols.protocol import Protocol
from stopmim.evals.request import ImageRequest, Request
from stopmim.evals.results import Z99, Measured, Result
from stopmim.runs.verdict import RANDOM_INIT

COARSE = 0.05  # half width of an interval above which a message warns in advance
Quantity = tuple[str, str, str, str]  # name, protocol, label, selection


def evaluate(
    name: str, protocols: Sequence[Protocol], request: Request
) -> tuple[list[Result], dict[str, Any]]:
    """Measures the encoder called `name`; returns the results and the facts to record with each."""
    inputs, facts = open_inputs(name, protocols, request)
    return suite(inputs, protocols), facts


def suite(inputs: Inputs, protocols: Sequence[Protocol] | None = None) -> list[Result]:
    """Results of `protocols`, by default SUITE, each beside that of untrained networks."""
    wanted = [kind() for kind in SUITE] if protocols is None else protocols
    obstacles = [(protocol, protocol.obstacle(inputs)) for protocol in wanted]
    possible = [protocol for protocol, obstacle in obstacles if not obstacle]
    if wanted and not possible:
        raise DataError("; ".join(f"{p.name}: {obstacle}" for p, obstacle in obstacles))
    say(*(f"{p.name}: left out, {obstacle}" for p, obstacle in obstacles if obstacle))
    # Several untrained networks are for a paired interval, which takes an answer per image.
    paired = [p for p in possible if p.needs == "labels" and p.cacheable]
    if paired and inputs.labels and inputs.random_inits > 1:  # wrong labels are an error first
        _say_if_few(len(inputs.test))
    ours, before = measure(inputs, possible, aloud=True), dict[Quantity, list[Measured]]()
    beside = [p for p in possible if p.compared]
    total = inputs.random_inits if paired else min(1, len(beside))
    last = 0.0  # seconds that the network before took
    for i, twin in enumerate(islice(inputs.untrained_twins(), total)):
        left = f", about {duration(last * (total - i))} left" if last > QUIET else ""
        say(f"{RANDOM_INIT}, network {i + 1} of {total}{left}")
        begin = time.monotonic()
        for measured in measure(twin, paired if i else beside):
            before.setdefault(quantity(measured.result), []).append(measured)
        last = time.monotonic() - begin
    return [_beside(measured, before.get(quantity(measured.result), [])) for measured in ours]


def _say_if_few(n: int) -> None:
    """Says before any work which differences `n` test images are too few for."""
    half = Z99 * 0.5 / math.sqrt(max(1, n))  # 0.5: deviation of right or wrong, by even chances
    if half > COARSE:
        points = f"differences to {RANDOM_INIT} below about {100 * half:.0f} points"
        say(f"{n:,} test images are few: {points} may not be distinguishable")


def _beside(ours: Measured, before: Sequence[Measured]) -> Result:
    """Our result with the mean of the untrained networks, and the interval of the difference."""
    if not before:
        return ours.result
    mean = math.fsum(m.result.value for m in before) / len(before)
    answers = [m.correct for m in before if m.correct is not None]
    interval = None
    if ours.correct is not None and len(answers) > 1:  # one does not show how much they differ
        interval = beside_random_init(ours.correct, answers)
    return dataclasses.replace(ours.result, random_init=mean, difference=interval)


def quantity(result: Result) -> Quantity:
    """Identity of the number, by which two encoders are compared."""
    return result.name, result.protocol, result.label, result.selection


def measure(inputs: Inputs, protocols: Sequence[Protocol], aloud: bool = False) -> list[Measured]:
    """Measures the encoder alone, not untrained networks: label by label, then the rest.

    Prints each number as it comes, if `aloud`.
    """
    # Cached together: features that one protocol has computed serve the others.
    together = [p for p in protocols if p.cacheable and p.needs != "videos"]
    groups = [together, *([p] for p in protocols if p not in together)]
    found = []
    for group in filter(None, groups):
        for measured in _measure(inputs, group, aloud):
            found.append(measured)
            faultpoint("eval.measured")
            if aloud:
                say(described(measured.result))
    return found


def described(result: Result) -> str:
    """A number in words: ``knn count: 41.2 % (chance 12.5 %)``."""
    name = "" if result.name in ("accuracy", result.protocol) else result.name
    what = " ".join(filter(None, (result.protocol, result.label, name)))
    if result.unit != "percent":
        return f"{what}: {result.value:.1f}"
    chance = "" if result.chance is None else f" (chance {100 * result.chance:.1f} %)"
    return f"{what}: {100 * result.value:.1f} %{chance}"


def _measure(inputs: Inputs, protocols: list[Protocol], aloud: bool) -> Iterator[Measured]:
    labelled = [p for p in protocols if p.needs == "labels"]
    labels = inputs.labels if labelled else []  # wrong ones are reported before any work
    key = _cache_key(inputs, protocols, labels)
    if key is not None and (cached := cache.load("answers", key)):
        tensors, text = cached
        kept = json.loads(text)
        for i, fields in enumerate(kept["results"]):
            interval = fields.pop("interval")  # JSON made a list of it
            result = Result(**fields, interval=interval and tuple(interval))
            yield Measured(result, tensors.get(str(i)))
        if aloud:
            _warn_of_copies(kept["copies"], len(inputs.test), inputs.test.fingerprint)
        return
    found = []
    questions = [(p, label) for label in labels for p in labelled]
    for protocol, label in [*questions, *((p, "") for p in protocols if p not in labelled)]:
        facts = protocol.facts(inputs)
        facts |= {"options": changed} if (changed := _changed(protocol, facts)) else {}
        chance = _chance(inputs, label) if label else None
        answers = iter(protocol.measure(inputs, label))
        while True:
            with busy(f"{protocol.name} {label}".rstrip()):  # a sign of life where it takes long
                answer = next(answers, None)
            if answer is None:
                break
            result = dataclasses.replace(answer[0], chance=chance, facts=facts)
            found.append(Measured(result, answer[1]))
            yield found[-1]
    copies = inputs.copies
    if aloud:
        _warn_of_copies(copies, len(inputs.test), inputs.test.fingerprint)
    if key is not None:
        results = [dataclasses.asdict(m.result) for m in found]
        text = json.dumps({"results": results, "copies": copies})
        # Cloned: these are rows of one tensor, which would be stored whole.
        correct_of = {
            str(i): m.correct.clone() for i, m in enumerate(found) if m.correct is not None
        }
        cache.store("answers", key, correct_of, text)


@once
def _warn_of_copies(copies: int, n: int, fingerprint: str) -> None:
    """Warns, once for the test images of this `fingerprint`, that some are in training as well."""
    if copies:
        warn(
            f"{copies:,} of {n:,} test images have exactly the features of a training image, as "
            f"copies do, which makes numbers too high; `stopmim check` lists them for --skip"
        )


def _changed(protocol: Protocol, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Options that differ from their defaults, unless facts or another column record them."""
    recorded = {"selection", "pictures", "video_size", *facts}
    options = [f for f in dataclasses.fields(protocol) if f.name not in recorded]  # type: ignore[arg-type]
    found = {f.name: x for f in options if (x := getattr(protocol, f.name)) != f.default}
    return {name: str(x) if isinstance(x, Path) else x for name, x in found.items()}


def _chance(inputs: Inputs, label: str) -> float:
    """Accuracy of one answer for all test images: the class of theirs most common in training."""
    y, test_y = inputs.labels_of(label)
    known = y[torch.isin(y, test_y)]
    return int((test_y == known.mode().values).sum()) / len(test_y) if len(known) else 0.0


def _cache_key(inputs: Inputs, protocols: list[Protocol], labels: list[str]) -> str | None:
    if not cache.covers(inputs.encoder) or not all(p.cacheable for p in protocols):
        return None
    videos = all(p.needs == "videos" for p in protocols)
    how = inputs.request.precision, str(inputs.precision)  # "auto" is another one for videos
    on = cache.key(inputs.size, inputs.without_images, how) if videos else inputs.key(labels)
    facts = [p.facts(inputs) for p in protocols]
    options = [value for p in protocols for value in vars(p).values()]
    paths = [value for value in options if isinstance(value, Path)]
    lists = [read_regular(path) for path in paths if os.path.isfile(path)]
    code, encoder = cache.of_code(*cache.ANSWERS), cache.of_encoder(inputs.encoder)
    return cache.key(code, encoder, on, protocols, facts, lists)


def open_inputs(
    name: str, protocols: Sequence[Protocol], request: Request
) -> tuple[Inputs, dict[str, Any]]:
    """Opens encoder and images, and collects the facts to record with every result."""
    encoder, step = open_at(name, request.branch)
    facts: dict[str, Any] = {"encoder": name, "branch": request.branch}
    if isinstance(request, ImageRequest):
        if request.crops and all(protocol.own_view for protocol in protocols):
            own = f"{protocols[0].name} has a view of its own; leave --crops out"
            raise UserError(f"--crops {request.crops}: {own}")
        train, test = open_pair(encoder, request)
        crops = request.crops or next((p.crops for p in protocols if p.crops), None)
        inputs = Inputs(encoder, train, test, dataclasses.replace(request, crops=crops))
        facts["train_data"] = _described(train, request.train or request.data)
        facts["test_data"] = _described(test, request.test or request.data)
        facts |= {"seed": request.seed} | ({"size": request.size} if request.size else {})
    else:
        inputs = Inputs(encoder, request=ImageRequest(**vars(request)))
    return inputs, facts | {"step": step}


def _described(images: Images, given: str | None) -> str:
    where = str(images) if isinstance(images, Scenes) else given or images.fingerprint
    return f"{where} ({len(images)} images)"
