"""Measures an encoder by several protocols, beside the same encoder before training."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stopmim.base.console import say
from stopmim.data.images import Images
from stopmim.data.sources.scenes import Scenes
from stopmim.evals import cache
from stopmim.evals.inputs import Inputs, open_at, open_pair
from stopmim.evals.protocols import SUITE
from stopmim.evals.protocols.protocol import Protocol
from stopmim.evals.request import ImageRequest, Request
from stopmim.evals.results import Measured, Result


def evaluate(
    name: str, protocols: Sequence[Protocol], request: Request
) -> tuple[list[Result], dict[str, Any]]:
    """Measures the encoder called `name`; returns the results and the facts to record with each."""
    inputs, facts = open_inputs(name, protocols, request)
    return suite(inputs, protocols), facts


def suite(inputs: Inputs, protocols: Sequence[Protocol] | None = None) -> list[Result]:
    """Results of `protocols`, by default SUITE, each beside that of the untrained encoder."""
    possible = []
    for protocol in [kind() for kind in SUITE] if protocols is None else protocols:
        if obstacle := protocol.obstacle(inputs):
            say(f"{protocol.name}: left out, {obstacle}")
        else:
            possible.append(protocol)
    results = [m.result for m in measure(inputs, possible)]
    twin = inputs.untrained_twin()
    if twin is None:
        return results
    before = {quantity(m.result): m.result.value for m in measure(twin, possible)}
    return [dataclasses.replace(r, random_init=before.get(quantity(r))) for r in results]


def quantity(result: Result) -> tuple[str, ...]:
    """Identity of the number, by which two encoders are compared."""
    return result.name, result.protocol, result.label, result.selection


def measure(inputs: Inputs, protocols: Sequence[Protocol]) -> list[Measured]:
    """Measures the encoder alone, not its untrained twin: label by label, then the rest."""
    # Cached together: features that one protocol has computed serve the others.
    together = [p for p in protocols if p.cacheable and p.needs != "videos"]
    groups = [together, *([p] for p in protocols if p not in together)]
    return [measured for group in groups if group for measured in _measure(inputs, group)]


def _measure(inputs: Inputs, protocols: list[Protocol]) -> list[Measured]:
    labelled = [p for p in protocols if p.needs == "labels"]
    labels = inputs.labels if labelled else []  # wrong ones are reported before any work
    key = _cache_key(inputs, protocols, labels)
    if key is not None and (cached := cache.load("answers", key)):
        tensors, text = cached
        found = []
        for i, fields in enumerate(json.loads(text)):
            interval = fields.pop("interval")  # JSON made a list of it
            result = Result(**fields, interval=interval and tuple(interval))
            found.append(Measured(result, tensors.get(str(i))))
        return found
    found = [m for label in labels for p in labelled for m in p.measure(inputs, label)]
    found += [m for p in protocols if p not in labelled for m in p.measure(inputs, "")]
    if key is not None:
        text = json.dumps([dataclasses.asdict(m.result) for m in found])
        # Cloned: these are rows of one tensor, which would be stored whole.
        correct = {str(i): m.correct.clone() for i, m in enumerate(found) if m.correct is not None}
        cache.store("answers", key, correct, text)
    return found


def _cache_key(inputs: Inputs, protocols: list[Protocol], labels: list[str]) -> str | None:
    if not cache.covers(inputs.encoder) or not all(p.cacheable for p in protocols):
        return None
    videos = all(p.needs == "videos" for p in protocols)
    on = cache.key(inputs.size, inputs.without_images) if videos else inputs.key(labels)
    facts = [p.facts(inputs) for p in protocols]
    options = [value for p in protocols for value in vars(p).values()]
    lists = [path.read_bytes() for path in options if isinstance(path, Path) and path.is_file()]
    code, encoder = cache.of_code(*cache.ANSWERS), cache.of_encoder(inputs.encoder)
    return cache.key(code, encoder, on, protocols, facts, lists)


def open_inputs(
    name: str, protocols: Sequence[Protocol], request: Request
) -> tuple[Inputs, dict[str, Any]]:
    """Opens encoder and images, and collects the facts to record with every result."""
    encoder, step = open_at(name, request.branch)
    facts: dict[str, Any] = {"encoder": name, "branch": request.branch}
    if isinstance(request, ImageRequest):
        train, test = open_pair(encoder, request)
        crops = request.crops or next((p.crops for p in protocols if p.crops), None)
        inputs = Inputs(encoder, train, test, dataclasses.replace(request, crops=crops))
        facts["train_data"] = _described(train, request.train or request.data)
        facts["test_data"] = _described(test, request.test or request.data)
        facts |= {"seed": request.seed} | ({"size": request.size} if request.size else {})
    else:
        inputs = Inputs(encoder, request=ImageRequest(**vars(request)))
    for protocol in protocols:
        facts |= protocol.facts(inputs)
    return inputs, facts | {"step": step}


def _described(images: Images, given: str | None) -> str:
    where = str(images) if isinstance(images, Scenes) else given or images.fingerprint
    return f"{where} ({len(images)} images)"
