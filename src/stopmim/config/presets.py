"""Presets: complete configs, each with its cost, its needs and the numbers to expect.

The paper's four tables are here as StoP and as I-JEPA, each also as the released code runs it; then
MAE and small models. ``PRESETS["tiny_cpu"]()`` and ``presets.tiny_cpu()`` return the config.
"""

from dataclasses import dataclass, replace

from stopmim.config.schema import (
    Config,
    DataConfig,
    MaskingConfig,
    OptimConfig,
    PositionsConfig,
    PredictorConfig,
    RuntimeConfig,
    override,
)

IMAGENET = 1_281_167  # training images of ImageNet-1k


@dataclass(frozen=True)
class Cost:
    """Training time, as hours of one H200 or minutes on the preset's hardware; or not measured."""

    hours: int | None = None
    minutes: float | None = None
    images: int = IMAGENET  # in the data set that this time is for
    is_lower_bound: bool = False
    note: str = ""

    @property
    def text(self) -> str:
        if self.hours is not None:
            return f"{'more than ' if self.is_lower_bound else ''}{self.hours} hours"
        return "not measured" if self.minutes is None else f"about {self.minutes:g} minutes"


@dataclass(frozen=True)
class Needs:
    """Images, hardware and memory that a preset is made for."""

    pixels: tuple[int, int] = (224, 224)  # edge of the images, smallest and largest
    hardware: str = "GPUs"
    memory_gib: float | None = None  # measured peak on one GPU
    batch: int | None = None  # images at a time on that GPU


@dataclass(frozen=True)
class Preset:
    """A named config, and what one wants to know before running it."""

    name: str
    about: str
    config: Config
    cost: Cost = Cost()
    expects: str = ""  # numbers and their source; empty if nothing was published or measured
    needs: Needs = Needs()
    notes: str = ""  # why the settings are what they are
    data: str = "imagenet/train"  # of the command
    options: str = ""  # of the command

    def __call__(self) -> Config:
        return self.config

    @property
    def command(self) -> str:
        place = f"--preset {self.name} --out runs/{self.name}"
        return f"stopmim pretrain {self.data} {place} {self.options}".rstrip()


def _top1(one_percent: float, last: float | None = None, last4: float | None = None) -> str:
    rest = f", {last} on the last layer and {last4} on the last four" if last else ""
    return f"{one_percent} % with 1 % of labels{rest} (linear, ImageNet-1k, from the paper)"


def _twin(stop: Preset, memory_gib: float, *top1: float) -> Preset:
    """The same run with I-JEPA's certain positions."""
    return replace(
        stop,
        name=stop.name.replace("_stop", "_ijepa"),
        about=f"I-JEPA twin of {stop.name}: sine-cosine positions.",
        config=override(stop.config, {"positions.kind": "sincos"}),
        expects=_top1(*top1),
        needs=replace(stop.needs, memory_gib=memory_gib),
    )


def _released(preset: Preset, about: str, changes: dict[str, object], expects: str = "") -> Preset:
    """The same run by the released code.

    Its 32 GPUs saw 64 images each, and the length of a released context depends on that 64. Parts
    of different lengths are not compiled, so the preset's hours are a lower bound.
    """
    return replace(
        preset,
        name=f"{preset.name}_released",
        about=about,
        config=override(preset.config, {"compat": "released", "runtime.accumulate": 32} | changes),
        cost=replace(preset.cost, is_lower_bound=True),
        expects=expects,
        needs=Needs(),
    )


# ------------------------------------------------------------------------------ the paper

# Optimizer settings are those of the paper's appendix; what it leaves out (first and last learning
# rate, EMA) is I-JEPA's. Hours follow from the measured speed of a step: see benchmarks/.
ABLATION = Preset(
    "ablation_b16_stop",
    "The paper's ablations: ViT-B/16, 300 epochs, sigma 0.25.",
    Config(optim=OptimConfig(epochs=300, lr=1e-3)),
    Cost(25),
    _top1(57.8),
    Needs(memory_gib=13.3, batch=256),
)
VIT_B = Preset(
    "vit_b16_stop",
    "The paper's ViT-B/16, 600 epochs.",
    Config(optim=OptimConfig(epochs=600, lr=8e-4)),
    Cost(50),
    _top1(60.3, 72.6, 74.5),
    Needs(memory_gib=13.3, batch=256),
)
VIT_L = Preset(
    "vit_l16_stop",
    "The paper's ViT-L/16, 600 epochs.",
    Config(arch="vit_l16", optim=OptimConfig(epochs=600, lr=8e-4)),
    Cost(145),
    _top1(65.1, 77.1, 78.5),
    Needs(memory_gib=18.7, batch=128),
)
VIT_H = Preset(
    "vit_h14_stop",
    "The paper's ViT-H/14, 300 epochs, sigma 0.2.",
    # The paper's table says 600 epochs, its caption and text 300.
    Config(arch="vit_h14", optim=OptimConfig(epochs=300, lr=1e-3, warmup_epochs=40)),
    Cost(180),
    _top1(65.4, 79.0, 79.6),
    Needs(memory_gib=22.5, batch=64),
)
ABLATION_IJEPA = _twin(ABLATION, 13.2, 54.3)
VIT_B_IJEPA = _twin(VIT_B, 13.2, 57.1, 70.9, 72.9)
VIT_L_IJEPA = _twin(VIT_L, 18.6, 64.2, 76.1, 77.5)
VIT_H_IJEPA = _twin(VIT_H, 22.4, 62.9, 78.2, 79.3)

_HIGHER: dict[str, object] = {"optim.final_lr": 1e-4}
_FROZEN: dict[str, object] = {"arch": "vit_h16", "optim.freeze_epoch": 250}
# Hours of ViT-H/16 follow from ViT-H/14 by the number of operations.
_H16 = replace(VIT_H, name="vit_h16_stop", cost=Cost(138))
_H16_IJEPA = replace(VIT_H_IJEPA, name="vit_h16_ijepa", cost=Cost(138))
_OFF = "The released code with StoP off: bare positions, not I-JEPA's mask token."
RELEASED = (
    _released(VIT_B, "The released configs/pretrain/vit-b16.yaml.", _HIGHER, VIT_B.expects),
    _released(VIT_B_IJEPA, _OFF, _HIGHER),
    _released(VIT_L, "The released configs/pretrain/vit-l16.yaml.", _HIGHER, VIT_L.expects),
    _released(VIT_L_IJEPA, _OFF, _HIGHER),
    _released(_H16, "The released vit-h16.yaml: patch 16, rates frozen from epoch 250.", _FROZEN),
    _released(_H16_IJEPA, _OFF, _FROZEN),
    _released(ABLATION, "The ablations by the released code, which has no such config.", _HIGHER),
    _released(ABLATION_IJEPA, _OFF, _HIGHER),
)

# ------------------------------------------------------------------------------ MAE

# MAE's own settings: 1.5e-4 per 256 images, from 0 to 0, and constant weight decay.
_MAE_OPTIM = OptimConfig(
    epochs=800,
    batch_size=4096,
    lr=2.4e-3,
    start_lr=0.0,
    final_lr=0.0,
    warmup_epochs=40,
    weight_decay=(0.05, 0.05),
    betas=(0.9, 0.95),
)
MAE = Preset(
    "mae_b16",
    "MAE's ViT-B/16, 800 epochs.",
    Config(
        class_token=True,
        target="pixels",
        data=DataConfig(crop_scale=(0.2, 1.0), augmentation="flip"),
        masking=MaskingConfig(kind="random"),
        positions=PositionsConfig(kind="sincos"),
        predictor=PredictorConfig(width=512, depth=8, heads=16),
        optim=_MAE_OPTIM,
    ),
    expects="somewhat less than the 68.0 % (last layer) that MAE reports for 1600 epochs",
)
MAE_STOP = replace(
    MAE,
    name="mae_b16_stop",
    about="MAE with StoP.",
    config=override(MAE.config, {"positions.kind": "stochastic"}),
    expects="nothing: the paper tried it without success and gives no details",
    notes="Two gentler variants: --positions.share 0.25 leaves three of four masked tokens certain "
    "of their place; --positions.ramp 100 lets sigma grow over 100 epochs.",
)

# ------------------------------------------------------------------------------ your own images

CONTINUE = Preset(
    "continue_b16",
    "Continues pretraining of an existing ViT-B/16 on your images.",
    Config(
        optim=OptimConfig(
            epochs=100, batch_size=1024, lr=2e-4, start_lr=2e-5, warmup_epochs=10, ema=(0.9995, 1.0)
        )
    ),
    Cost(note="100 epochs of your images at the speed of vit_b16_stop"),
    notes="The predictor is new, and its first gradients would harm a good encoder: hence the low "
    "learning rate, the long warm-up, and a target encoder that hardly moves at first.",
    data="my_images",
    options="--init ijepa.pth.tar",
)
SMALL = Preset(
    "small_images",
    "ViT-S/8 for images of 32 to 96 px on one GPU.",
    Config(
        arch="vit_s8",
        image_size=64,
        masking=MaskingConfig(
            target_scale=(0.14, 0.14), target_aspect=(1.0, 1.0), context_length=24
        ),
        positions=PositionsConfig(sigma=0.0625),
        predictor=PredictorConfig(width=192),
        optim=OptimConfig(epochs=30, batch_size=64, lr=1.25e-4, start_lr=1e-4, warmup_epochs=3),
    ),
    Cost(minutes=2, images=50_000, note="on an H200, after a minute of compiling"),
    "more than three times the k-NN accuracy of random init, and 20 points more with a linear head "
    "(docs/results.md)",
    Needs((32, 96), "one GPU", memory_gib=1.2, batch=64),
    "Batch and learning rate are small; fewer images need more epochs. The settings for large "
    "images reach less in as many minutes. Sigma is the released code's, below the paper's.",
    data="my_images",
)
TINY = Preset(
    "tiny_cpu",
    "Minutes on two CPU cores: the demo and the tests.",
    Config(
        arch="vit_micro6",
        image_size=48,
        data=DataConfig(crop_scale=(0.6, 1.0)),
        masking=MaskingConfig(targets=2, target_scale=(0.06, 0.1), context_length=24),
        predictor=PredictorConfig(width=96, depth=3),
        optim=OptimConfig(
            epochs=4, batch_size=32, lr=3e-4, start_lr=1e-4, warmup_epochs=0.5, ema=(0.999, 0.99)
        ),
        # A second thread saves a third of the time on two idle cores, but takes several times as
        # long once something else wants one of them: threads wait for each other at every layer.
        runtime=RuntimeConfig(threads=1),
    ),
    Cost(minutes=4, images=8192),
    "linear accuracy some 3 points above random init for counting and 13 for distance (README)",
    Needs((48, 48), "two CPU cores"),
    "Against collapse of so small a model in so few updates: a predictor as wide as the encoder "
    "and almost as deep, a low learning rate, small targets, and a target encoder that hardly "
    "moves at first (EMA 0.999); it moves faster later, unlike in a long run, to catch up.",
    data="scenes:8192:48",
)
TINY_QUICK = replace(
    TINY,
    name="tiny_cpu_quick",
    about="tiny_cpu in batches of 16, for half the scenes: the default of ablate.",
    config=override(TINY.config, {"optim.batch_size": 16}),
    cost=Cost(minutes=1.5, images=4096, note="on one core"),
    expects="the tables in docs/ablations.md",
    data="scenes:4096:48",
)
TINY_MAE = replace(
    TINY,
    name="tiny_cpu_mae",
    about="MAE on two CPU cores, for trials and ablations.",
    config=TINY.config.model_copy(
        update={
            "class_token": True,
            "target": "pixels",
            "norm_pixels": False,
            "masking": MAE.config.masking,
            "positions": MAE.config.positions,
            "optim": _MAE_OPTIM.model_copy(
                update={"epochs": 4, "batch_size": 32, "lr": 1e-3, "warmup_epochs": 0.25}
            ),
        }
    ),
    cost=Cost(minutes=2, images=4096),
    expects="linear accuracy some 16 points above random init for distance and 2 for shape and "
    "counting (one run, on the scenes it was chosen by)",
    notes="Pixels are not normalised: so small a model learns next to nothing from normalised ones "
    "in so few updates.",
    data="scenes:4096:48",
)

# The order in which `stopmim presets` lists them.
PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        *(TINY, SMALL, CONTINUE),
        *(VIT_B, VIT_B_IJEPA, VIT_L, VIT_L_IJEPA, VIT_H, VIT_H_IJEPA, ABLATION, ABLATION_IJEPA),
        *(MAE, MAE_STOP, TINY_QUICK, TINY_MAE),
        *RELEASED,
    )
}


def __getattr__(name: str) -> Preset:
    if name in PRESETS:
        return PRESETS[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
