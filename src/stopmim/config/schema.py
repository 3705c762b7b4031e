"""Every knob of a run: its default, its meaning, and what makes it invalid. Imports no torch."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from stopmim.base.errors import UserError
from stopmim.config.architectures import parse_arch
from stopmim.config.data import DataConfig
from stopmim.config.section import (
    Beta,
    Compat,
    Count,
    Decay,
    Fraction,
    FractionRange,
    Levels,
    Momentum,
    Range,
    Section,
    count_or_share,
    has_no_effect,
)
from stopmim.config.yaml_text import parse_yaml, validate

MOST_THREADS = 1024  # torch crashes with 100,000
MOST_PATCHES = 256  # along an edge: with more, neither attention nor the check of masks ends
MOST_WORKERS = 256


class MaskingConfig(Section):
    kind: Literal["multiblock", "random"] = "multiblock"
    """multiblock: predict rectangles (I-JEPA); random: predict single patches (MAE)"""
    targets: int = Field(default=4, ge=1, le=1000)
    """rectangles to predict per image"""
    target_scale: FractionRange = (0.15, 0.2)
    """area of a rectangle as a fraction of the grid: smallest, largest"""
    target_aspect: Range = (0.75, 1.5)
    """height of a rectangle over its width: smallest, largest"""
    context_scale: FractionRange = (0.85, 1.0)
    """area of the visible square, before rectangles are cut out of it: smallest, largest"""
    context_length: Annotated[Count | Fraction | None, BeforeValidator(count_or_share)] = None
    """patches the encoder sees: their number, or a share of the grid; null: 28 %"""
    compat: Compat | Literal["none"] | None = None
    """released: the released sampler with its bias; none: corrected; null: as the main compat"""
    ratio: float = Field(default=0.75, gt=0, lt=1)
    """fraction of hidden patches, for kind: random"""

    @model_validator(mode="after")
    def _every_knob_has_an_effect(self) -> Self:
        multiblock = ("targets", "target_scale", "target_aspect", "context_scale", "context_length")
        unused = {"multiblock": ("ratio",), "random": (*multiblock, "compat")}
        has_no_effect(self, unused.get(self.kind, ()), f"kind: {self.kind}")
        return self


class PositionsConfig(Section):
    """Positions of the predictor's tokens."""

    kind: Literal["sincos", "learned", "stochastic", "jitter"] = "stochastic"
    """stochastic: StoP; sincos: I-JEPA; learned: a learned table; jitter: moved by a few patches"""
    sigma: float | None = Field(default=None, ge=0, le=1e6)
    """variance of the noise; null: 0.25, ViT-H 0.2, released 0.0625, 0.04; jitter: 1 patch^2"""
    base: Literal["sincos", "learned"] = "sincos"
    """table of mean positions, psi"""
    covariance: Literal["tied", "untied", "fixed", "conditioned"] = "tied"
    """tied: sigma A A^T, A of the context; untied: own A; fixed: sigma I; conditioned: by image"""
    tokens: Literal["masked", "context", "both"] = "masked"
    """tokens at uncertain positions"""
    share: Fraction = 1.0
    """fraction of these tokens that are uncertain, chosen at random; the others are certain"""
    levels: Levels | None = None
    """factors of sigma, as [0.25, 1, 4], one of which is drawn per target block; null: 1"""
    ramp: float = 0
    """epochs over which sigma grows from 0 to its value; negative: falls to 0; 0: constant sigma"""

    @model_validator(mode="after")
    def _every_knob_has_an_effect(self) -> Self:
        stop = ("base", "covariance", "share", "levels", "ramp")
        every = (*stop, "sigma", "tokens")
        unused = {"sincos": every, "learned": every, "jitter": stop}
        has_no_effect(self, unused.get(self.kind, ()), f"kind: {self.kind}")
        if self.covariance == "conditioned" and self.tokens != "masked":
            what = "does not work with covariance: conditioned, which is for masked tokens only"
            raise ValueError(f"tokens: {self.tokens} {what}; leave out one of them")
        return self


class PredictorConfig(Section):
    width: int = Field(default=384, ge=4, le=16384, multiple_of=4)
    """width of its tokens"""
    depth: int | None = Field(default=None, ge=1, le=200)
    """number of blocks; null: 2 (ViT-Micro), 6 (Ti, S, B), 12 (L, H), 16 (g)"""
    heads: int | None = Field(default=None, ge=1, le=4096)
    """attention heads; null: as many as the encoder"""


class OptimConfig(Section):
    epochs: int = Field(default=600, ge=1, le=10**6)
    """passes over the images"""
    batch_size: int = Field(default=2048, ge=1, le=10**6)
    """images per update over all GPUs, so that a config means the same run on any machine"""
    lr: float = Field(default=8e-4, gt=0, le=1000)
    """peak learning rate, after the warmup"""
    start_lr: float = Field(default=2e-4, ge=0, le=1000)
    """learning rate at the start of the warmup"""
    final_lr: float = Field(default=1e-6, ge=0, le=1000)
    """learning rate at the end of the cosine"""
    warmup_epochs: float = Field(default=15, ge=0)
    """epochs of linear warmup from start_lr to lr"""
    weight_decay: tuple[Decay, Decay] = (0.04, 0.4)
    """first and last value, along a cosine; matrices only"""
    ema: tuple[Momentum, Momentum] = (0.996, 1.0)
    """momentum of the target encoder: first and last value, linear in between"""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """betas of AdamW"""
    clip_grad: float | None = Field(default=None, gt=0)
    """largest norm of the whole gradient; null: no clipping"""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """an update whose loss or gradient is not finite ends the run, or is skipped"""
    spike: float | None = Field(default=None, gt=1)
    """skips updates whose loss or gradient is this many times its running mean; null: none"""
    penalty_l1: float = Field(default=0.0, ge=0, le=1e6)
    """adds this times the sum of |A| to the loss; A is the matrix that projects the context"""
    penalty_l2: float = Field(default=0.0, ge=0, le=1e6)
    """adds this times the sum of A^2 to the loss"""
    freeze_epoch: int | None = Field(default=None, ge=1, le=10**6)
    """epoch from which learning rate and weight decay stay constant (released ViT-H)"""


class RuntimeConfig(Section):
    """How a run is executed; changes its result by rounding at most."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if there is one"""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """auto: bf16 on a GPU that has it, else fp16 with loss scaling; fp32 on a CPU"""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile; auto: on a GPU without released masks, as CUDA graphs unless fsdp or fp16"""
    kernels: Literal["usual", "fused"] = "usual"
    """fused: norms with additions, attention by blocks, AdamW with EMA; half precision on a GPU"""
    residual: Literal["fp32", "half"] = "fp32"
    """half: the residual stream is as precise as the layers, with bf16 or fp16; norms stay fp32"""
    accumulate: int = Field(default=1, ge=1, le=10**6)
    """parts a batch is split into, over all GPUs: 8 means 8 on one GPU, 1 on each of 8"""
    on_oom: Literal["stop", "halve"] = "stop"
    """out of memory while training ends the run, or halves the parts of a batch and continues"""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """on several GPUs; ddp: each holds the whole model; fsdp: each holds a shard of it"""
    checkpoints: Literal["whole", "sharded"] = "whole"
    """of fsdp; whole: rank 0 writes the model; sharded: each rank its part; both load anywhere"""
    recompute: Literal["on", "off"] = "off"
    """activation checkpointing: about a third of the activation memory, a third more time"""
    workers: int | None = Field(default=None, ge=0, le=MOST_WORKERS)
    """processes that read images; null: by the cores per GPU, at most 16, none for scenes"""
    worker_timeout: int = Field(default=300, ge=0, le=10**6)
    """seconds after which a process that reads one image counts as hanging; 0: never"""
    threads: int | None = Field(default=None, ge=1, le=MOST_THREADS)
    """CPU threads of torch; null: torch's choice, and on resume that of the first start"""
    log_every: int = Field(default=10, ge=1, le=10**9)
    """updates between two lines of metrics.jsonl"""
    health_every: int | None = Field(default=None, ge=0, le=10**9)
    """updates between two health measurements; null: 1.5 % of the time; 0: never"""
    mirror: Literal["none", "tensorboard", "wandb"] = "none"
    """writes the metrics to RUN/tensorboard or RUN/wandb (offline) as well"""
    save_every: int | None = Field(default=None, ge=1, le=10**9)
    """updates between two checkpoints; null: ten minutes; besides, one at the end"""
    keep: int = Field(default=2, ge=2, le=10**9)
    """newest checkpoints to keep, at least 2: a crash could damage the newest"""


class Config(Section):
    """Every knob of a run. All but `runtime` determine its numbers and stay fixed on resume."""

    arch: str = "vit_b16"
    """vit_<size><patch>: size micro, ti, s, b, l, h or g, any patch size"""
    image_size: int = Field(default=224, ge=1, le=16384)
    """edge of the square crops in pixels, a multiple of the patch size"""
    class_token: bool = False
    """prepends a class token; needed to continue from MAE, DINO or iBOT"""
    target: Literal["features", "pixels"] = "features"
    """what is predicted: features of the EMA target encoder (I-JEPA) or pixels (MAE)"""
    norm_pixels: bool = True
    """normalises the pixels of each patch by their mean and deviation; for target: pixels"""
    init: str | None = None
    """file or run whose encoder the run starts from, instead of random weights"""
    seed: int = Field(default=0, ge=0, lt=2**64)
    """seed of weights, order, crops, masks and noise"""
    compat: Compat | None = None
    """released: every quirk of the released code at once; docs/faithfulness.md lists them"""
    lowres: Literal["bilinear", "max"] | None = None
    """also predicts the targets at half resolution: their mean or maximum over 2x2 patches"""
    target_layers: int = Field(default=1, ge=1, le=200)
    """layers of the target encoder to predict, evenly spaced in depth up to the last"""
    visible_loss: float = Field(default=0.0, ge=0, le=1e6)
    """weight of the loss on visible patches, each by 1 / sqrt(distance to the target block)"""
    vicreg: float = Field(default=0.0, ge=0, le=1e6)
    """weight of VICReg's variance and covariance terms of the features; C-JEPA: 0.001"""
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
        pixels, width, batch = self.image_size, self.predictor.width, self.optim.batch_size
        if pixels % patch:
            what = f"patch {patch} of {self.arch} does not divide {pixels}"
            near = max(patch, round(pixels / patch) * patch)
            raise ValueError(f"image_size: {what}; {near} works")
        if pixels > MOST_PATCHES * patch:
            what = f"{pixels // patch} patches of {patch} pixels along an edge"
            raise ValueError(f"image_size: {what}; at most {MOST_PATCHES} work")
        if width % (heads := self.predictor.heads or size.heads):
            what = f"{width} is not divisible by {heads} heads"
            raise ValueError(f"predictor.width: {what}; set predictor.heads")
        if batch % (parts := self.runtime.accumulate):
            what = f"{parts} parts do not divide the batch of {batch}"
            raise ValueError(f"runtime.accumulate: {what}")
        if self.compat == "released":
            unused = ("covariance", "tokens", "base", "share", "levels", "ramp")
            has_no_effect(self.positions, unused, "compat: released")
        most, warmup, ramp = self.optim.epochs, self.optim.warmup_epochs, self.positions.ramp
        for key, epochs in (("optim: warmup_epochs", warmup), ("positions.ramp", ramp)):
            if abs(epochs) > most:
                raise ValueError(f"{key} {epochs:g} is more than {most} epochs")
        return self

    @model_validator(mode="after")
    def _target_agrees(self) -> Self:
        beside = ("target_layers", "visible_loss", "vicreg")
        has_no_effect(self, beside if self.lowres else (), f"lowres: {self.lowres}")
        for key, value, needed in (
            ("positions.kind", self.positions.kind, "sincos"),
            ("target", self.target, "features"),
        ):
            if self.lowres and value != needed:
                raise ValueError(f"lowres: needs {key}: {needed}, got {value}")
        depth = parse_arch(self.arch)[0].depth
        if self.target_layers > depth:
            raise ValueError(f"target_layers: {self.arch} has {depth}, got {self.target_layers}")
        unused = {"features": ("norm_pixels",), "pixels": beside}
        has_no_effect(self, unused.get(self.target, ()), f"target: {self.target}")
        if self.target != "pixels":
            return self
        if self.compat == "released":
            raise ValueError("compat: the released code predicts features, not target: pixels")
        if self.optim.ema != (usual := OptimConfig.model_fields["ema"].default):
            raise ValueError(
                "optim.ema has no effect with target: pixels, which has no target encoder; "
                f"leave it out, or set it to {usual[0]:g} {usual[1]:g}"
            )
        return self

    @property
    def side(self) -> int:
        """Patches along one edge of the grid."""
        return self.image_size // parse_arch(self.arch)[1]

    @property
    def context_length(self) -> int | None:
        """`masking.context_length` as a number of patches."""
        length = self.masking.context_length
        return max(1, round(length * self.side**2)) if isinstance(length, float) else length


def resolve(config: Config) -> Config:
    """`config` with every null default filled in, as `run.json` records it."""
    size, _ = parse_arch(config.arch)
    sigma, compat = config.positions.sigma, config.masking.compat or config.compat or "none"
    if sigma is None and config.positions.kind == "stochastic":
        std_or_variance = 0.2 if config.arch.startswith("vit_h") else 0.25
        # The released code passes the paper's number as a standard deviation.
        sigma = std_or_variance**2 if config.compat == "released" else std_or_variance
    if sigma is None and config.positions.kind == "jitter":
        sigma = 1.0
    filled = {
        "positions.sigma": sigma,
        "masking.compat": compat if config.masking.kind == "multiblock" else None,
        "masking.context_length": config.context_length,
        "data.augmentation": config.data.augmentation or config.compat or "crop",
        "predictor.depth": config.predictor.depth or size.predictor_depth,
        "predictor.heads": config.predictor.heads or size.heads,
    }
    return override(config, filled)


def override(config: Config, changes: Mapping[str, object], source: str = "config") -> Config:
    """A validated copy of `config` with some keys replaced; raises UserError.

    A key is dotted (``"optim.lr"``), or names a section whose value is a mapping of its keys. A
    new `kind` of a section resets the section's other keys to their defaults.
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
    return validate(Config, tree, source)


def from_yaml(text: str, source: str) -> Config:
    """The config in `text`, with defaults for missing keys; messages name `source`."""
    tree = parse_yaml(text, source)
    return validate(Config, {} if tree is None else tree, source)


def type_of(key: str) -> Any:
    """Annotated type of a dotted key, or None if there is no such key."""
    node: Any = Config
    for name in key.split("."):
        fields = getattr(node, "model_fields", {})
        node = fields[name].annotation if name in fields else None
    return node


def takes_text(key: str) -> bool:
    """Whether the key takes free text, such as a path, which is not parsed as YAML."""
    return type_of(key) in (str, str | None)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted key and the value of every leaf of a dumped config."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
