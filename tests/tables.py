"""What is computed in README and docs/: every key of a config, what a run costs, what was found.

Tables, and numbers within a sentence, stand in the pages between two comments; ``make tables``
writes them there anew, and test_tables.py fails if one is stale. What a run costs comes from the
newest files in benchmarks/, so that a new measurement changes the page; what was found from the
records in results/, by results.py, with its figures; where masks lie is drawn by placement.py.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

import placement
import results
from stopmim.ablations.page import page as paper_page
from stopmim.ablations.paper import TABLES
from stopmim.bench.accounting import Account, Tokens, account
from stopmim.bench.growth import draw_growth
from stopmim.bench.loader import GPUS, feeding
from stopmim.bench.step import BATCH
from stopmim.config.presets import IMAGENET, PRESETS
from stopmim.config.schema import Config
from stopmim.config.section import Section
from stopmim.method.build import build, configure

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
NEAREST = {"vit_h16": "vit_h14"}  # measured in place of what is not

# ------------------------------------------------------------------------------ every key


def config_tables() -> dict[str, str]:
    """Name of a section, or "config" for the keys outside of all, to its table."""
    config = Config()
    sections = {
        name: value
        for name in Config.model_fields
        if isinstance(value := getattr(config, name), Section)
    }
    return {name: _keys(section, name) for name, section in {"config": config, **sections}.items()}


def _keys(section: Section, name: str) -> str:
    rows: list[list[object]] = [["key", "default", "may be", "meaning"]]
    properties = type(section).model_json_schema()["properties"]
    prefix = "" if name == "config" else f"{name}."
    for key, field in type(section).model_fields.items():
        value = getattr(section, key)
        if not isinstance(value, Section):
            rows.append([f"`{prefix}{key}`", f"`{json.dumps(value)}`", allowed(properties[key])])
            rows[-1].append(escaped(field.description or ""))
    return _table(*rows)


def escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def allowed(schema: dict[str, Any]) -> str:
    """What pydantic takes for a key, in words."""
    if "anyOf" in schema:
        return ", ".join(allowed(one) for one in schema["anyOf"])
    if "prefixItems" in schema:
        each = allowed(schema["prefixItems"][0])
        kind = "integers" if each.startswith("an integer") else "numbers"
        each = each.removeprefix("an integer").removeprefix("a number")
        return f"two {kind},{each}" if each else f"two {kind}"
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{one}`" for one in schema.get("enum", [schema.get("const")]))
    words = {"integer": "an integer", "number": "a number", "boolean": "`true`, `false`"}
    limits = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {schema[key]:g}" for key, sign in limits.items() if key in schema]
    if "multipleOf" in schema:
        bounds.append(f"a multiple of {schema['multipleOf']}")
    if "pattern" in schema:
        bounds.append(f"that ends in {schema['pattern'].strip('$').replace(chr(92), '')}")
    if schema["type"] == "array":
        each = "number" if schema["items"]["type"] == "number" else "name"
        several = f"{schema['minItems']} to {schema['maxItems']} {each}s"
        return several if schema["minItems"] > 1 else f"a {each} per channel"
    kind = words.get(schema["type"], "`null`" if schema["type"] == "null" else "text")
    return " ".join([kind, " and ".join(bounds)]).strip()


# -------------------------------------------------------------------------- what a run costs


@cache
def measured(kind: str, wanted: str = "") -> tuple[dict[str, Any], ...]:
    """The lines of the newest file of a kind: "step_vit_b16_nvidia-h200", "loader_x86-64".

    Of those that have the `wanted` text: whoever measures one thing anew does not measure all.
    """
    for path in sorted((ROOT / "benchmarks").glob(f"{kind}_????-??-??.md"), reverse=True):
        text = path.read_text().split("```json\n")[1].split("```")[0]
        if wanted in text:
            return tuple(json.loads(line) for line in text.splitlines())
    return ()


PROFILE = '"bench": "step kernels"'


def own_step(arch: str) -> dict[str, Any] | None:
    """The step of a preset as it is, with its own masks, if it was measured."""
    lines = measured(f"step_{arch}_nvidia-h200", '"masks": "own"')
    return next((line for line in lines if line.get("masks") == "own"), None)


@dataclass(frozen=True)
class Cost:
    """Of an architecture, by its parameters and by what was measured of it or of the nearest."""

    arch: str
    encoder: int  # parameters; the target encoder has as many
    predictor: int
    rate: float  # images per second on one GPU
    batch: int  # on one GPU, at which it was or would be measured
    memory: float  # bytes on one GPU, at that batch
    is_measured: bool

    @property
    def trained(self) -> int:
        return self.encoder + self.predictor

    @property
    def checkpoint(self) -> int:
        """Bytes: three networks, and two moments of those that are trained."""
        return 4 * (self.trained + self.encoder) + 8 * self.trained

    def all_reduced(self, gpus: int) -> float:
        """Bytes that leave a GPU, or a node of a ring, per update with DDP."""
        return 2 * (gpus - 1) / gpus * 4 * self.trained

    def sharded(self, gpus: int) -> float:
        """The same with FSDP2: weights are gathered for the forward pass (those of the target
        encoder too) and for the backward pass, and gradients are scattered; float32."""
        return (gpus - 1) / gpus * 4 * (3 * self.trained + self.encoder)


def tokens(arch: str) -> tuple[int, int, int]:
    """Patches of an image, of a context and of one target, of what was measured."""
    config = Config(arch=arch)
    one = own_step(arch) or own_step("vit_b16")
    assert one is not None
    return config.side**2, one["context"], one["target"]


def operations(arch: str, encoder: int, predictor: int) -> float:
    """Of one image: two per weight and token forward, four backward; the four targets apart."""
    patches, context, target = tokens(arch)
    return encoder * (2 * patches + 6 * context) + predictor * 6 * 4 * (context + target)


def activations(config: Config) -> float:
    """What is kept of one image for the backward pass, as features: tokens x width x blocks."""
    with torch.device("meta"):
        encoder = build(config).encoder
    _, context, target = tokens(config.arch)
    predictor = config.predictor
    assert predictor.depth is not None
    seen = context * encoder.width * len(encoder.blocks)
    return seen + 4 * (context + target) * predictor.width * predictor.depth


def state(encoder: int, predictor: int) -> float:
    """Bytes of weights, gradients and two moments, and of the target encoder, in float32."""
    return 16 * (encoder + predictor) + 4 * encoder


@cache
def cost(arch: str) -> Cost:
    config = configure(Config(arch=arch))
    with torch.device("meta"):
        model = build(config)
    encoder, predictor = (
        sum(p.numel() for p in part.parameters()) for part in (model.encoder, model.predictor)
    )
    if one := own_step(arch):
        memory = one["peak_memory_mib"] * 2**20
        return Cost(arch, encoder, predictor, one["images_per_s"], one["batch_size"], memory, True)
    near = cost(NEAREST[arch])
    rate = near.rate * operations(near.arch, near.encoder, near.predictor)
    rate /= operations(arch, encoder, predictor)
    batch = BATCH.get(arch, 64)
    memory = state(encoder, predictor) + batch * bytes_per_feature(near) * activations(config)
    return Cost(arch, encoder, predictor, rate, batch, memory, False)


def bytes_per_feature(near: Cost) -> float:
    kept = near.memory - state(near.encoder, near.predictor)
    return kept / near.batch / activations(configure(Config(arch=near.arch)))


def hours(preset: str) -> float:
    """Of one GPU, for the epochs of a preset on ImageNet."""
    config = PRESETS[preset]()
    images = IMAGENET // config.optim.batch_size * config.optim.batch_size
    return config.optim.epochs * images / cost(config.arch).rate / 3600


GROWTH_FIGURE = "growth.svg"
ARCHES = ("vit_b16", "vit_l16", "vit_h14")
# What was profiled, and with which config.
PROFILED = {arch: f"{arch}_stop" for arch in ARCHES} | {"vit_s8": ROOT / "results/prototype.yaml"}
BANDWIDTH = 4.8e12  # bytes per second, as NVIDIA states for an H200; used where no copy was timed
RUNS = ("ablation_b16_stop", "vit_b16_stop", "vit_l16_stop", "vit_h14_stop")


def scale_tables() -> dict[str, str]:
    return {
        "cost": _cost(),
        "kernels": _kernels(),
        "operations": _operations(),
        "account": _account(),
        "growth": _growth(),
        "memory": _memory(),
        "network": _network(),
        "feeding": _feeding(),
    }


def _name(one: Cost) -> str:
    return _network_name(one.arch) + ("" if one.is_measured else " (not measured)")


def _network_name(arch: str) -> str:
    size, patch = re.fullmatch(r"vit_([a-z])(\d+)", arch).groups()  # type: ignore[union-attr]
    return f"ViT-{size.upper()}/{patch}"


def _table(*rows: list[object]) -> str:
    head, *body = ([str(cell) for cell in row] for row in rows)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body))


def _cost() -> str:
    rows: list[list[object]] = [["preset", "network", "epochs", "images/s of one GPU"]]
    rows[0] += [f"hours on {gpus}" for gpus in (1, 8, 32)]
    for preset in RUNS:
        config = PRESETS[preset]()
        one, total = cost(config.arch), hours(preset)
        each = [f"{total / gpus:.3g}" for gpus in (1, 8, 32)]
        rows.append([f"`{preset}`", _name(one), config.optim.epochs, f"{one.rate:,.0f}", *each])
    return _table(*rows)


def _kernels() -> str:
    """What the time of a step of ViT-B goes to."""
    lines = measured("step_vit_b16_nvidia-h200", PROFILE)
    step = next(line for line in lines if line.get("masks") == "published")  # what was profiled
    kinds = next(line for line in lines if line["bench"] == "step kernels")
    spent = {kind: ms for kind, ms in kinds.items() if kind != "bench"}
    spent["between kernels"] = max(0.0, step["ms"] - sum(spent.values()))
    rows: list[list[object]] = [["what", "ms", "share"]]
    for kind, ms in sorted(spent.items(), key=lambda item: -item[1]):
        rows.append([kind, f"{ms:.1f}", f"{ms / step['ms']:.0%}"])
    return _table(*rows)


def _profiled(arch: str) -> tuple[dict[str, Any], dict[str, float], Account]:
    """The step of a network that was profiled, its milliseconds by kind, and its account."""
    found = measured(f"step_{arch}_nvidia-h200", PROFILE)
    steps = [line for line in found if line["bench"] == "step"]
    step = next((line for line in steps if line["masks"] == "published"), steps[0])
    kinds = next(line for line in found if line["bench"] == "step kernels")
    config = configure(PROFILED[arch], {"optim.batch_size": step["batch_size"]})
    tokens = Tokens(step["context"], config.masking.targets, step["target"])
    return step, kinds, account(config, tokens, 2)


def _operations() -> str:
    rows: list[list[object]] = [["network", "target encoder", "context encoder", "predictor"]]
    rows[0] += ["all, GFLOP per image", "at the rate of a product, ms", "measured, ms"]
    for arch in PROFILED:
        step, _, found = _profiled(arch)
        parts = {part: sum(works[part].flops for works in found.values()) for part in found["GELU"]}
        total = sum(parts.values())
        each = [f"{n / step['batch_size'] / 1e9:.1f}" for n in (*parts.values(), total)]
        floor = total / step["matmul_tflops"] / 1e9
        rows.append([_network_name(arch), *each, f"{floor:.1f}", f"{step['ms']:.1f}"])
    return _table(*rows)


def _account() -> str:
    rows: list[list[object]] = [["network", "work", "TFLOP", "GB", "floor, ms", "measured, ms"]]
    rows[0] += ["measured / floor"]
    for arch in PROFILED:
        step, kinds, found = _profiled(arch)
        copied = 1e9 * step.get("copy_gb_per_s", BANDWIDTH / 1e9)
        for kind, works in found.items():
            flops, moved = (sum(getattr(w, x) for w in works.values()) for x in ("flops", "bytes"))
            rates = 1e12 * step["matmul_tflops"], copied
            floor = 1e3 * sum(work.seconds(*rates) for work in works.values())
            rows.append([_network_name(arch), kind, f"{flops / 1e12:.1f}", f"{moved / 1e9:.1f}"])
            rows[-1] += [f"{floor:.1f}", f"{kinds[kind]:.1f}", f"{kinds[kind] / floor:.2f}"]
    return _table(*rows)


def _growth() -> str:
    rows: list[list[object]] = [["what is varied", "value", "patches seen", "patches of a target"]]
    rows[0] += ["ms", "images/s", "GiB"]
    for line in measured("growth_nvidia-h200"):
        rows.append([f"`{line['varied']}`", line["value"], line["context"], line["target"]])
        rows[-1] += [f"{line['ms']:.1f}", f"{line['images_per_s']:,.0f}"]
        rows[-1] += [f"{line['peak_memory_mib'] / 1024:.1f}"]
    return _table(*rows)


def growth_figure() -> str:
    lines = measured("growth_nvidia-h200")
    return results.svg(draw_growth(lines), fingerprint(lines))


def fingerprint(lines: tuple[dict[str, Any], ...]) -> str:
    """Equal for equal figures, whatever version of matplotlib draws them."""
    return hashlib.sha256(json.dumps(lines).encode()).hexdigest()[:16]


def _memory() -> str:
    rows: list[list[object]] = [["network", "images at a time", "GiB", "weights and moments"]]
    rows[0] += ["activations", "bytes per feature", "with FSDP2 on 8", "checkpoint, GB"]
    for one in map(cost, ARCHES):
        own, gib = state(one.encoder, one.predictor), 2**30
        each = [one.memory, own, one.memory - own]
        near = one if one.is_measured else cost(NEAREST[one.arch])
        rows.append([_name(one), one.batch, *(f"{n / gib:.1f}" for n in each)])
        rows[-1] += [f"{bytes_per_feature(near):.1f}", f"{(one.memory - own * 7 / 8) / gib:.1f}"]
        rows[-1] += [f"{one.checkpoint / 1e9:.1f}"]
    return _table(*rows)


def _network() -> str:
    rows: list[list[object]] = [["network", "GPUs", "ms per update", "DDP sends, GB", "GB/s"]]
    rows[0] += ["FSDP2 sends, GB", "GB/s"]
    for one in map(cost, ARCHES):
        for gpus in (8, 32):
            seconds = Config().optim.batch_size / gpus / one.rate
            rows.append([_name(one), gpus, f"{1e3 * seconds:.0f}"])
            for sent in (one.all_reduced(gpus), one.sharded(gpus)):
                rows[-1] += [f"{sent / 1e9:.2f}", f"{sent / 1e9 / seconds:.0f}"]
    return _table(*rows)


def _feeding() -> str:
    about, *lines = measured("loader_x86-64")
    rate = {line["bench"]: line["images_per_s"] for line in lines if "images_per_s" in line}
    one_core = [rate["one thread, simplejpeg"], rate["one thread, pillow"]]
    one_core += [rate["loader, workers 1"], rate["loader, packed at 256 px"]]
    rows: list[list[object]] = [["", "images/s", "MB/s from disk", "on 8 GPUs, GB/s"]]
    rows[0] += ["simplejpeg alone", "Pillow alone", "a worker process", "packed at 256 px"]
    rows[0] += ["cores for 1 GPU", f"for {GPUS} GPUs"]
    rows.append(["one core reads", "", "", "", *(f"{each:.0f} images/s" for each in one_core)])
    rows[-1] += ["", ""]
    for one in map(cost, ARCHES):
        disk = one.rate * about["kilobytes"] / 1e3
        rows.append([_name(one), f"{one.rate:,.0f}", f"{disk:.0f}", f"{8 * disk / 1e3:.1f}"])
        rows[-1] += [f"{one.rate / each:.1f} cores" for each in one_core]
        needed = feeding(one.arch, one.rate, rate["loader, workers 1"])
        rows[-1] += [needed["cores"], needed[f"cores_for_{GPUS}_gpus"]]
    return _table(*rows)


# ------------------------------------------------------------------------------ the ablations


def ablation_tables() -> dict[str, str]:
    rows: list[list[object]] = [["in the paper", "command", "about", "rows"]]
    for name, one in TABLES.items():
        lines = Counter(row.line or row.name for row in one.rows)
        shown = (line if n == 1 else f"{line} at {n} values" for line, n in lines.items())
        rows.append([one.source, f"`ablate {name}`", one.about, ", ".join(shown)])
    return {"tables": _table(*rows), "hours": _ablation_hours()}


def _ablation_hours() -> str:
    alike: dict[int, list[str]] = {}
    for name, one in TABLES.items():
        if not one.published:
            alike.setdefault(len(one.rows), []).append(f"`{name}`")
    each = PRESETS["ablation_b16_stop"].cost.hours
    assert each is not None
    rows: list[list[object]] = [["table, one seed", "runs", "hours"]]
    return _table(*rows, *([", ".join(alike[n]), n, n * each] for n in sorted(alike)))


# -------------------------------------------------------------------------------- the pages

PAGES: dict[str, Callable[[], dict[str, str]]] = {
    "docs/ablations.md": ablation_tables,
    "docs/configure.md": config_tables,
    "docs/scale.md": scale_tables,
    "docs/faithfulness.md": placement.tables,
    **dict.fromkeys([*results.PAGES, "README.md"], results.all_tables),
}
_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.S)
_NUMBER = re.compile(r"(<!-- number: (.*?) -->).*?(<!-- end -->)", re.S)


def filled(text: str, tables: Mapping[str, str], numbers: Mapping[str, str]) -> str:
    """The text of a page with the tables and numbers as they are now."""
    text = _TABLE.sub(lambda m: f"{m[1]}\n{tables[m[2]]}\n\n{m[3]}", text)
    return _NUMBER.sub(lambda m: f"{m[1]}{numbers[m[2]]}{m[3]}", text)


def page(name: str) -> str:
    """What a page should hold now."""
    return filled((ROOT / name).read_text(), PAGES[name](), results.all_numbers())


def names(name: str) -> list[str]:
    """Of the tables that a page has."""
    return [match[2] for match in _TABLE.finditer((ROOT / name).read_text())]


PAPER = "docs/paper.md"  # which the command writes as a whole


def paper() -> str:
    return paper_page(results.RESULTS)


if __name__ == "__main__":
    (ROOT / PAPER).write_text(paper())
    for name in PAGES:
        (ROOT / name).write_text(page(name))
    for name, figure in {GROWTH_FIGURE: growth_figure(), **results.all_figures()}.items():
        results.FIGURES.mkdir(exist_ok=True)
        (results.FIGURES / name).write_text(figure)
