"""Every knob of a run, its default, and what makes it invalid. Imports no torch, opens no file."""

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from stopmim.base.errors import UserError
from stopmim.config.architectures import parse_arch

Compat = Literal["released"]
Fraction = Annotated[float, Field(gt=0, le=1)]
Momentum = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0)]


class Section(BaseModel):
    """Exact types, no unknown key, no infinity, no change after construction."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,  # the text below a field is its comment in `--dry-run`
    )


def _has_no_effect(section: Section, names: tuple[str, ...], reason: str) -> None:
    for name in names:
        if getattr(section, name) != type(section).model_fields[name].default:
            raise ValueError(f"{name} has no effect with {reason}; leave it out")


def _in_order(name: str, pair: tuple[float, float]) -> None:
    if not 0 < pair[0] <= pair[1]:
        raise ValueError(f"{name} must be 0 < smallest <= largest, got {pair[0]:g}, {pair[1]:g}")


class DataConfig(Section):
    crop_scale: tuple[Fraction, Fraction] = (0.3, 1.0)
    """area of the random crop as a fraction of the image, smallest and largest"""
    augmentation: Literal["crop", "flip", "released"] | None = None
    """crop: random crop. flip: also mirrored (MAE). released: also grey, blur. null: as compat"""
    max_bad: float = Field(default=0.01, ge=0, le=1)
    """share of unreadable images above which the run stops"""
    skip: str | None = Field(default=None, pattern=r"\.jsonl$")
    """list of images to leave out: what `stopmim check --fix-list` writes, or a bad_files.jsonl"""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        _in_order("crop_scale", self.crop_scale)
        return self


class MaskingConfig(Section):
    kind: Literal["multiblock", "random"] = "multiblock"
    """multiblock: rectangles to predict (I-JEPA). random: single patches (MAE)"""
    targets: int = Field(default=4, ge=1)
    """rectangles to predict per image"""
    target_scale: tuple[Fraction, Fraction] = (0.15, 0.2)
    """area of a rectangle as a fraction of the grid, smallest and largest"""
    target_aspect: tuple[float, float] = (0.75, 1.5)
    """its height over its width, smallest and largest"""
    context_scale: tuple[Fraction, Fraction] = (0.85, 1.0)
    """area of the square that is seen, before the rectangles are cut out of it"""
    context_length: int | None = Field(default=None, ge=1)
    """patches the encoder sees; null: 28 % of the grid"""
    compat: Compat | Literal["none"] | None = None
    """released: the released sampler with its bias. none: corrected. null: as the main compat"""
    ratio: float = Field(default=0.75, gt=0, lt=1)
    """share of hidden patches, for kind: random"""

    @model_validator(mode="after")
    def _every_knob_has_an_effect(self) -> Self:
        multiblock = ("targets", "target_scale", "target_aspect", "context_scale", "context_length")
        unused = {"multiblock": ("ratio",), "random": (*multiblock, "compat")}[self.kind]
        _has_no_effect(self, unused, f"kind: {self.kind}")
        for name in multiblock[1:4]:
            _in_order(name, getattr(self, name))
        return self


class PositionsConfig(Section):
    """What the predictor is told about the place of a token."""

    kind: Literal["sincos", "learned", "stochastic", "jitter"] = "stochastic"
    """stochastic: StoP. sincos: I-JEPA. learned: a learned table. jitter: moved by a few patches"""
    sigma: float | None = Field(default=None, ge=0)
    """variance of n_j; null: 0.25, ViT-H 0.2, compat 0.0625, 0.04. of jitter, in patches^2: 1"""
    base: Literal["sincos", "learned"] = "sincos"
    """the table of means, psi"""
    covariance: Literal["tied", "untied", "fixed", "conditioned"] = "tied"
    """sigma A A^T, tied: A of the context, untied: own A; fixed: sigma I; conditioned: on images"""
    tokens: Literal["masked", "context", "both"] = "masked"
    """the tokens at uncertain places"""
    share: Fraction = 1.0
    """share of these tokens whose place is uncertain, chosen at random; the others know theirs"""
    ramp: float = Field(default=0, ge=0)
    """epochs over which sigma grows from 0 to its value; 0: it has its value from the start"""

    @model_validator(mode="after")
    def _every_knob_has_an_effect(self) -> Self:
        if self.kind in ("sincos", "learned"):
            unused = ("sigma", "base", "covariance", "tokens", "share", "ramp")
            _has_no_effect(self, unused, f"kind: {self.kind}")
        if self.kind == "jitter":
            _has_no_effect(self, ("base", "covariance", "share", "ramp"), "kind: jitter")
        if self.covariance == "conditioned" and self.tokens != "masked":
            raise ValueError(
                f"tokens: {self.tokens}, but covariance: conditioned is of masked tokens alone; "
                f"leave out one of them"
            )
        return self


class PredictorConfig(Section):
    width: int = Field(default=384, ge=4, multiple_of=4)
    """of its tokens"""
    depth: int | None = Field(default=None, ge=1)
    """null: 6 (ViT-Ti, S, B), 12 (L, H), 16 (g)"""
    heads: int | None = Field(default=None, ge=1)
    """null: as many as the encoder"""


class OptimConfig(Section):
    epochs: int = Field(default=600, ge=1)
    """passes over the images"""
    batch_size: int = Field(default=2048, ge=1)
    """images per update over all GPUs, so that a config means the same run on any machine"""
    lr: float = Field(default=8e-4, gt=0)
    """its peak, after the warm-up"""
    start_lr: float = Field(default=2e-4, ge=0)
    """where the warm-up begins"""
    final_lr: float = Field(default=1e-6, ge=0)
    """where the cosine ends"""
    warmup_epochs: float = Field(default=15, ge=0)
    """from start_lr to lr, linearly"""
    weight_decay: tuple[Decay, Decay] = (0.04, 0.4)
    """from the first to the last update, along a cosine; matrices only"""
    ema: tuple[Momentum, Momentum] = (0.996, 1.0)
    """momentum of the target encoder, from the first to the last update, linearly"""
    betas: tuple[Momentum, Momentum] = (0.9, 0.999)
    """AdamW's"""
    clip_grad: float | None = Field(default=None, gt=0)
    """largest norm of the whole gradient; null: no clipping"""
    penalty_l1: float = Field(default=0.0, ge=0)
    """times the sum of |A|, the matrix that projects the context, is added to the loss"""
    penalty_l2: float = Field(default=0.0, ge=0)
    """times the sum of A^2 is added to the loss"""
    freeze_epoch: int | None = Field(default=None, ge=1)
    """learning rate and weight decay stay as they are from this epoch on (released ViT-H)"""

    @model_validator(mode="after")
    def _schedule_fits(self) -> Self:
        if self.warmup_epochs > self.epochs:
            raise ValueError(
                f"warmup_epochs {self.warmup_epochs:g} is more than {self.epochs} epochs"
            )
        return self


class RuntimeConfig(Section):
    """How a run is carried out: nothing here changes its result, except for rounding."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if there is one"""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """auto: bf16 on a GPU that has it, else fp16 with loss scaling; fp32 on a CPU"""
    compile: Literal["auto", "on", "off"] = "auto"
    """the loss, by torch; auto: on a GPU, not for released masks; one GPU, one part: CUDA graphs"""
    accumulate: int = Field(default=1, ge=1)
    """parts a batch is computed in, over all GPUs together: 8 is 8 on one GPU, 1 on each of 8"""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """several GPUs. ddp: each has the whole model. fsdp: each has a share of it, to save memory"""
    recompute: Literal["on", "off"] = "off"
    """activation checkpointing: about a third of the memory of activations, a third more time"""
    workers: int | None = Field(default=None, ge=0)
    """processes that read images; null: one per core, at most 8, none for scenes"""
    worker_timeout: int = Field(default=300, ge=0)
    """seconds after which a process that reads one image counts as hanging; 0: never"""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of torch; null: torch's own choice, and on resume that of the first start"""
    log_every: int = Field(default=10, ge=1)
    """updates between two lines of metrics.jsonl"""
    health_every: int | None = Field(default=None, ge=0)
    """updates between two looks at its health; null: 1.5 % of the time; 0: never"""
    mirror: Literal["none", "tensorboard", "wandb"] = "none"
    """where metrics.jsonl is written a second time: RUN/tensorboard, or RUN/wandb (offline)"""
    save_every: int | None = Field(default=None, ge=1)
    """updates between two checkpoints; null: an epoch"""
    keep: int = Field(default=2, ge=2)
    """newest checkpoints that are kept; one alone could be the one a crash cut short"""


class Config(Section):
    """Every knob of a run. All but `runtime` decide its numbers, and never change within it."""

    arch: str = "vit_b16"
    """vit_<size><patch>: micro, ti, s, b, l, h or g, at any patch size"""
    image_size: int = Field(default=224, ge=1)
    """pixels along an edge of the square crops; a multiple of the patch"""
    class_token: bool = False
    """a token that is no patch before the others: needed to go on from MAE, DINO or iBOT"""
    target: Literal["features", "pixels"] = "features"
    """what is predicted. features: of an encoder that follows slowly (I-JEPA). pixels: MAE"""
    norm_pixels: bool = True
    """pixels of a patch less their mean, over their deviation; for target: pixels"""
    init: str | None = None
    """file or run whose encoder the run begins with, instead of random weights"""
    seed: int = Field(default=0, ge=0)
    """of weights, order, crops, masks and noise"""
    compat: Compat | None = None
    """released: every quirk of the released code at once; docs/faithfulness.md lists them"""
    lowres: Literal["bilinear", "max"] | None = None
    """also predicts the targets at half the resolution: their mean or maximum over 2x2 patches"""
    data: DataConfig = DataConfig()
    masking: MaskingConfig = MaskingConfig()
    positions: PositionsConfig = PositionsConfig()
    predictor: PredictorConfig = PredictorConfig()
    optim: OptimConfig = OptimConfig()
    runtime: RuntimeConfig = RuntimeConfig()

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        try:
            size, patch = parse_arch(self.arch)
        except UserError as error:
            raise ValueError(str(error)) from None
        if self.image_size % patch:
            near = max(patch, round(self.image_size / patch) * patch)
            raise ValueError(
                f"image_size: patch {patch} of {self.arch} does not divide {self.image_size}; "
                f"{near} works"
            )
        if self.predictor.width % (heads := self.predictor.heads or size.heads):
            raise ValueError(
                f"predictor.width: {self.predictor.width} is not divisible by {heads} heads; "
                f"set predictor.heads"
            )
        if self.optim.batch_size % self.runtime.accumulate:
            raise ValueError(
                f"runtime.accumulate: {self.runtime.accumulate} parts do not divide the batch "
                f"of {self.optim.batch_size}"
            )
        if self.lowres and self.positions.kind != "sincos":
            raise ValueError(
                f"lowres: is for certain places, got positions.kind {self.positions.kind}; "
                f"set positions.kind: sincos"
            )
        if self.lowres and self.masking.kind != "multiblock":
            raise ValueError("lowres: needs rectangles; set masking.kind: multiblock")
        if self.lowres and self.target != "features":
            raise ValueError("lowres: is of features; set target: features")
        if self.compat == "released":
            unused = ("covariance", "tokens", "base", "share", "ramp")
            _has_no_effect(self.positions, unused, "compat: released")
        if self.positions.ramp > self.optim.epochs:
            raise ValueError(
                f"positions.ramp {self.positions.ramp:g} is more than {self.optim.epochs} epochs"
            )
        if self.target == "features":
            _has_no_effect(self, ("norm_pixels",), "target: features")
        elif self.compat == "released":
            raise ValueError("compat: the released code predicts features, not target: pixels")
        elif self.optim.ema != (usual := OptimConfig.model_fields["ema"].default):
            raise ValueError(
                "optim.ema has no effect with target: pixels, which has no target encoder; "
                f"leave it out, or set it to {usual[0]:g} {usual[1]:g}"
            )
        return self

    @property
    def side(self) -> int:
        """Patches along one edge of the grid."""
        return self.image_size // parse_arch(self.arch)[1]


def resolve(config: Config) -> Config:
    """`config` with every null that stands for "the usual" filled in, as `run.json` records it."""
    size, _ = parse_arch(config.arch)
    released = config.compat == "released"
    sigma = config.positions.sigma
    if sigma is None and config.positions.kind == "stochastic":
        std_or_variance = 0.2 if config.arch.startswith("vit_h") else 0.25
        # The released code hands the paper's number over as a standard deviation.
        sigma = std_or_variance**2 if released else std_or_variance
    if sigma is None and config.positions.kind == "jitter":
        sigma = 1.0
    return override(
        config,
        {
            "positions.sigma": sigma,
            "masking.compat": config.masking.compat or ("released" if released else "none")
            if config.masking.kind == "multiblock"
            else None,
            "data.augmentation": config.data.augmentation or ("released" if released else "crop"),
            "predictor.depth": config.predictor.depth or size.predictor_depth,
            "predictor.heads": config.predictor.heads or size.heads,
        },
    )


def override(config: Config, changes: Mapping[str, object], source: str = "config") -> Config:
    """A copy of `config` with keys replaced, all of it validated again, or a UserError.

    A key is dotted (``"optim.lr"``), or names a section whose value is a mapping of its keys. The
    `kind` of a section says what its other keys mean: another kind begins with their defaults.
    """
    tree = config.model_dump(mode="json")
    for section in ("masking", "positions"):
        given = changes.get(section)
        kind = given.get("kind") if isinstance(given, Mapping) else None
        if changes.get(f"{section}.kind", kind) not in (None, tree[section]["kind"]):
            tree[section] = {}
    for key, value in changes.items():
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
            if not isinstance(node, dict):
                raise UserError(f"{source}: {key}: {section} is not a section")
        if isinstance(value, Mapping) and isinstance(node.get(name), dict):
            node[name] |= value
        else:
            node[name] = value
    return _validated(tree, source)


def from_yaml(text: str, source: str) -> Config:
    """The config in `text`; what it leaves out has its default. `source` is for messages."""
    tree = parse_yaml(text, source)
    return _validated({} if tree is None else tree, source)


def parse_yaml(text: str, source: str) -> Any:
    """Plain values from YAML, without its traps; a UserError names the line."""
    if len(text) > 1_000_000:
        raise UserError(f"{source}: larger than 1 MB, which is no configuration")
    try:
        return _Loader(text).get_single_data()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}: line {mark.line + 1}" if mark else source
        what = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UserError(f"{where}: {what}") from None
    except RecursionError:
        raise UserError(f"{source}: nested too deeply") from None


def kind_of(key: str) -> Any:
    """The type of the values of a dotted key; None if there is no such key."""
    node: Any = Config
    for name in key.split("."):
        if not (isinstance(node, type) and issubclass(node, Section)):
            return None
        field_info = node.model_fields.get(name)
        node = field_info.annotation if field_info else None
    return node


def takes_text(key: str) -> bool:
    """Whether a value of this key is any text, as a path, and so is no YAML in a command line."""
    return kind_of(key) in (str, str | None)


def to_yaml(config: Section, indent: str = "") -> str:
    """`config` as a YAML file that `from_yaml` reads back, every key with its meaning."""
    lines = []
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(value, Section):
            about = (type(value).__doc__ or "") if "__doc__" in vars(type(value)) else ""
            lines.append(f"{indent}{name}:{_comment(about)}\n{to_yaml(value, indent + '  ')}")
        else:
            lines.append(f"{indent}{name}: {json.dumps(value)}{_comment(field.description)}\n")
    return "".join(lines)


def _comment(text: str | None) -> str:
    return f"  # {text}" if text else ""


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of every leaf of a dumped config."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _validated(tree: object, source: str) -> Config:
    try:
        # Through JSON, because strict mode takes a list for a tuple only from there.
        return Config.model_validate_json(json.dumps(tree, default=repr))
    except ValidationError as error:
        problems = [f"{source}: {_explain(problem)}" for problem in error.errors()]
        raise UserError("\n".join(problems)) from None


def _explain(problem: Any) -> str:
    *sections, name = map(str, problem["loc"]) if problem["loc"] else ("config",)
    key = ".".join([*sections, name])
    match problem["type"]:
        case "extra_forbidden":
            node: Any = Config
            for section in sections:
                node = node.model_fields[section].annotation
            near = difflib.get_close_matches(name, node.model_fields, n=1)
            names = ", ".join(node.model_fields)
            return f"{key}: unknown key; " + (
                f'did you mean "{".".join([*sections, near[0]])}"?'
                if near
                else f"there are {names}"
            )
        case "value_error":
            return (
                f"{problem['ctx']['error']}"
                if key == "config"
                else f"{key}: {problem['ctx']['error']}"
            )
        case _:
            text = problem["msg"][0].lower() + problem["msg"][1:]
            return f"{key}: {text}, got {problem['input']!r}"


class _Loader(yaml.SafeLoader):
    """YAML without its traps: no alias, no duplicate key, ``1e-4`` a number, ``no`` a word."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - emptied, then filled below

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem="aliases are not supported", problem_mark=mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        names = [key.value for key, _ in node.value]
        for i, (key, _) in enumerate(node.value):
            if key.value in names[:i]:
                problem = f"duplicate key {key.value!r}"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
        return super().construct_mapping(node, deep)


for _tag, _pattern, _first in (
    ("null", r"null|~|", ["n", "~", ""]),
    ("bool", r"true|false", ["t", "f"]),
    ("int", r"[-+]?(0|[1-9]\d*)", [*"-+0123456789"]),
    ("float", r"[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?", [*"-+.0123456789"]),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), _first
    )
