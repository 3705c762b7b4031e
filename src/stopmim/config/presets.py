"""Full configs of runs, as functions. The docstring says the command, the cost and what to expect.

The four tables of the paper are each here as StoP and as the I-JEPA twin it is compared with, and
each of these in `released` mode; then MAE. Expected numbers are the paper's, on ImageNet-1k: top-1
of a linear classifier on frozen features.

Costs are hours of one H200 for the paper's epochs of 1.28 million images, from the speed of a step
as it was measured (benchmarks/); ViT-H/16 from ViT-H/14 by its operations. Released
modes take longer: they compute in parts of 64 images, whose contexts differ in length, and so are
not compiled.
"""

from collections.abc import Callable

from stopmim.config.schema import (
    Config,
    DataConfig,
    MaskingConfig,
    OptimConfig,
    PositionsConfig,
    PredictorConfig,
    RuntimeConfig,
)

IJEPA = PositionsConfig(kind="sincos")

# The tables of the paper's appendix; what they leave out is I-JEPA's (start and final lr, EMA).
ABLATION_B = OptimConfig(epochs=300, lr=1e-3)
DOWNSTREAM_B = DOWNSTREAM_L = OptimConfig(epochs=600, lr=8e-4)
# The paper's table says 600 epochs, its caption and text 300.
DOWNSTREAM_H = OptimConfig(epochs=300, lr=1e-3, warmup_epochs=40)

# The released configs: a higher last learning rate for B and L, frozen schedules for H.
RELEASED_ABLATION_B = OptimConfig(epochs=300, lr=1e-3, final_lr=1e-4)
RELEASED_B = RELEASED_L = OptimConfig(epochs=600, lr=8e-4, final_lr=1e-4)
RELEASED_H = OptimConfig(epochs=300, lr=1e-3, warmup_epochs=40, freeze_epoch=250)
# MAE's own: 1.5e-4 for 256 images, from nothing to nothing; its weight decay does not grow.
MAE_B = OptimConfig(
    epochs=800,
    batch_size=4096,
    lr=2.4e-3,
    start_lr=0.0,
    final_lr=0.0,
    warmup_epochs=40,
    weight_decay=(0.05, 0.05),
    betas=(0.9, 0.95),
)
# 32 GPUs saw 64 images each, and the length of a released context depends on that 64.
IN_64S = RuntimeConfig(accumulate=32)


def ablation_b16_stop() -> Config:
    """The paper's ablations: ViT-B/16, 300 epochs, sigma 0.25. Expect 57.8 with 1 % of labels.

    ``stopmim pretrain imagenet/train --preset ablation_b16_stop --out runs/ablation``
    Cost: 25 hours.
    """
    return Config(optim=ABLATION_B)


def ablation_b16_ijepa() -> Config:
    """The sine-cosine row of the ablations. Expect 54.3 with 1 % of labels.

    ``stopmim pretrain imagenet/train --preset ablation_b16_ijepa --out runs/ablation-ijepa``
    Cost: 25 hours.
    """
    return Config(optim=ABLATION_B, positions=IJEPA)


def vit_b16_stop() -> Config:
    """The paper's ViT-B/16, 600 epochs. Expect 60.3 (1 %), 72.6 (last layer), 74.5 (last four).

    ``stopmim pretrain imagenet/train --preset vit_b16_stop --out runs/b16``
    Cost: 50 hours.
    """
    return Config(optim=DOWNSTREAM_B)


def vit_b16_ijepa() -> Config:
    """Its I-JEPA twin. Expect 57.1 (1 %), 70.9 (last layer), 72.9 (last four).

    ``stopmim pretrain imagenet/train --preset vit_b16_ijepa --out runs/b16-ijepa``
    Cost: 50 hours.
    """
    return Config(optim=DOWNSTREAM_B, positions=IJEPA)


def vit_l16_stop() -> Config:
    """The paper's ViT-L/16, 600 epochs. Expect 65.1 (1 %), 77.1 (last layer), 78.5 (last four).

    ``stopmim pretrain imagenet/train --preset vit_l16_stop --out runs/l16``
    Cost: 145 hours.
    """
    return Config(arch="vit_l16", optim=DOWNSTREAM_L)


def vit_l16_ijepa() -> Config:
    """Its I-JEPA twin. Expect 64.2 (1 %), 76.1 (last layer), 77.5 (last four).

    ``stopmim pretrain imagenet/train --preset vit_l16_ijepa --out runs/l16-ijepa``
    Cost: 145 hours.
    """
    return Config(arch="vit_l16", optim=DOWNSTREAM_L, positions=IJEPA)


def vit_h14_stop() -> Config:
    """The paper's ViT-H/14, 300 epochs, sigma 0.2. Expect 65.4, 79.0, 79.6.

    ``stopmim pretrain imagenet/train --preset vit_h14_stop --out runs/h14``
    Cost: 180 hours.
    """
    return Config(arch="vit_h14", optim=DOWNSTREAM_H)


def vit_h14_ijepa() -> Config:
    """Its I-JEPA twin. Expect 62.9 (1 %), 78.2 (last layer), 79.3 (last four).

    ``stopmim pretrain imagenet/train --preset vit_h14_ijepa --out runs/h14-ijepa``
    Cost: 180 hours.
    """
    return Config(arch="vit_h14", optim=DOWNSTREAM_H, positions=IJEPA)


def ablation_b16_stop_released() -> Config:
    """`ablation_b16_stop` as the released code would run it; no such config was released.

    ``stopmim pretrain imagenet/train --preset ablation_b16_stop_released --out runs/ablation-r``
    Cost: more than 25 hours.
    """
    return Config(compat="released", optim=RELEASED_ABLATION_B, runtime=IN_64S)


def ablation_b16_ijepa_released() -> Config:
    """The released code with StoP off: bare positions, not I-JEPA's mask token.

    ``stopmim pretrain imagenet/train --preset ablation_b16_ijepa_released --out runs/ablation-ri``
    Cost: more than 25 hours.
    """
    return Config(compat="released", optim=RELEASED_ABLATION_B, positions=IJEPA, runtime=IN_64S)


def vit_b16_stop_released() -> Config:
    """The released configs/pretrain/vit-b16.yaml. Expect what the paper reports for ViT-B/16.

    ``stopmim pretrain imagenet/train --preset vit_b16_stop_released --out runs/b16-r``
    Cost: more than 50 hours.
    """
    return Config(compat="released", optim=RELEASED_B, runtime=IN_64S)


def vit_b16_ijepa_released() -> Config:
    """The same with StoP off.

    ``stopmim pretrain imagenet/train --preset vit_b16_ijepa_released --out runs/b16-ri``
    Cost: more than 50 hours.
    """
    return Config(compat="released", optim=RELEASED_B, positions=IJEPA, runtime=IN_64S)


def vit_l16_stop_released() -> Config:
    """The released configs/pretrain/vit-l16.yaml. Expect what the paper reports for ViT-L/16.

    ``stopmim pretrain imagenet/train --preset vit_l16_stop_released --out runs/l16-r``
    Cost: more than 145 hours.
    """
    return Config(arch="vit_l16", compat="released", optim=RELEASED_L, runtime=IN_64S)


def vit_l16_ijepa_released() -> Config:
    """The same with StoP off.

    ``stopmim pretrain imagenet/train --preset vit_l16_ijepa_released --out runs/l16-ri``
    Cost: more than 145 hours.
    """
    return Config(
        arch="vit_l16", compat="released", optim=RELEASED_L, positions=IJEPA, runtime=IN_64S
    )


def vit_h16_stop_released() -> Config:
    """The released configs/pretrain/vit-h16.yaml: patch 16, rates frozen from epoch 250.

    ``stopmim pretrain imagenet/train --preset vit_h16_stop_released --out runs/h16-r``
    Cost: more than 138 hours.
    """
    return Config(arch="vit_h16", compat="released", optim=RELEASED_H, runtime=IN_64S)


def vit_h16_ijepa_released() -> Config:
    """The same with StoP off.

    ``stopmim pretrain imagenet/train --preset vit_h16_ijepa_released --out runs/h16-ri``
    Cost: more than 138 hours.
    """
    return Config(
        arch="vit_h16", compat="released", optim=RELEASED_H, positions=IJEPA, runtime=IN_64S
    )


def mae_b16() -> Config:
    """MAE's ViT-B/16, 800 epochs. Expect somewhat less than the 68.0 (last layer) of its 1600.

    ``stopmim pretrain imagenet/train --preset mae_b16 --out runs/mae``
    Cost: not measured.
    """
    return Config(
        class_token=True,
        target="pixels",
        data=DataConfig(crop_scale=(0.2, 1.0), augmentation="flip"),
        masking=MaskingConfig(kind="random"),
        positions=PositionsConfig(kind="sincos"),
        predictor=PredictorConfig(width=512, depth=8, heads=16),
        optim=MAE_B,
    )


def mae_b16_stop() -> Config:
    """MAE + StoP. Nothing to expect: the paper tried and did not succeed, without details.

    ``stopmim pretrain imagenet/train --preset mae_b16_stop --out runs/mae-stop``
    Cost: not measured. Two gentler ways: ``--positions.share 0.25`` leaves three of four masked
    tokens certain of their place, ``--positions.ramp 100`` lets sigma grow over 100 epochs.
    """
    return mae_b16().model_copy(update={"positions": PositionsConfig()})


def continue_b16() -> Config:
    """Goes on from a ViT-B/16 of somebody, on images of your own: give it --init.

    ``stopmim pretrain my_images --preset continue_b16 --out runs/mine --init ijepa.pth.tar``
    Cost: 100 epochs of your images at the speed of `vit_b16_stop`. Not measured: the predictor is
    new and its first gradients are of no use to a good encoder, hence the low rate after a long
    warm-up, and a target encoder that begins almost still.
    """
    return Config(
        optim=OptimConfig(
            epochs=100,
            batch_size=1024,
            lr=2e-4,
            start_lr=2e-5,
            warmup_epochs=10,
            ema=(0.9995, 1.0),
        )
    )


def small_images() -> Config:
    """ViT-S/8 for images of 32 to 96 px on one GPU.

    ``stopmim pretrain my_images/ --preset small_images --out runs/small``

    Cost: two minutes on an H200 for 50,000 images, after a minute of compiling. Expect more than
    three times the k-NN accuracy of random init and twenty points more with a linear head
    (docs/results.md); the settings of large images reach less in as many minutes. Batch and
    learning rate are small; fewer images want more epochs. Sigma is that of the released code,
    below the paper's.
    """
    return Config(
        arch="vit_s8",
        image_size=64,
        masking=MaskingConfig(
            target_scale=(0.14, 0.14), target_aspect=(1.0, 1.0), context_length=24
        ),
        positions=PositionsConfig(sigma=0.0625),
        predictor=PredictorConfig(width=192),
        optim=OptimConfig(epochs=30, batch_size=64, lr=1.25e-4, start_lr=1e-4, warmup_epochs=3),
    )


def tiny_cpu() -> Config:
    """Minutes on two CPU cores: the demo and the tests.

    ``stopmim pretrain scenes:8192:48 --preset tiny_cpu --out runs/tiny``

    Cost: about four minutes. Expect linear accuracy some 3 points above random init for counting
    and 13 for distance (README). What keeps so small a model from collapsing in so few updates: a
    predictor as wide as the encoder and almost as deep, a low learning rate, small targets, and a
    target encoder that begins almost still (EMA 0.999). It moves faster later, the reverse of a
    long run, so that it has caught up with the encoder at the end.
    """
    return Config(
        arch="vit_micro6",
        image_size=48,
        data=DataConfig(crop_scale=(0.6, 1.0)),
        masking=MaskingConfig(targets=2, target_scale=(0.06, 0.1), context_length=24),
        predictor=PredictorConfig(width=96, depth=3),
        optim=OptimConfig(
            epochs=4,
            batch_size=32,
            lr=3e-4,
            start_lr=1e-4,
            warmup_epochs=0.5,
            ema=(0.999, 0.99),
        ),
        # A second thread gains a third on two idle cores, and loses a factor of several as soon as
        # something else wants one of them: the threads wait for each other at every layer.
        runtime=RuntimeConfig(threads=1),
    )


def tiny_cpu_quick() -> Config:
    """`tiny_cpu` in batches of 16, which learns from half of the scenes: what `ablate` begins with.

    ``stopmim pretrain scenes:4096:48 --preset tiny_cpu_quick --out runs/quick``
    Cost: about a minute and a half on one core. Its tables are in docs/ablations.md.
    """
    usual = tiny_cpu()
    return usual.model_copy(update={"optim": usual.optim.model_copy(update={"batch_size": 16})})


def tiny_cpu_mae() -> Config:
    """MAE on two CPU cores, for trials and ablations.

    ``stopmim pretrain scenes:4096:48 --preset tiny_cpu_mae --out runs/tiny-mae``

    Cost: about two minutes. Expect linear accuracy some 16 points above random init for distance
    and 2 for shape and counting (one run, on the scenes it was chosen by). Pixels as they are: of
    normed ones so small a model learns next to nothing in so few updates.
    """
    return Config(
        arch="vit_micro6",
        image_size=48,
        class_token=True,
        target="pixels",
        norm_pixels=False,
        data=DataConfig(crop_scale=(0.6, 1.0)),
        masking=MaskingConfig(kind="random"),
        positions=PositionsConfig(kind="sincos"),
        predictor=PredictorConfig(width=96, depth=3),
        optim=OptimConfig(
            epochs=4,
            batch_size=32,
            lr=1e-3,
            start_lr=0.0,
            final_lr=0.0,
            warmup_epochs=0.25,
            weight_decay=(0.05, 0.05),
            betas=(0.9, 0.95),
        ),
        runtime=RuntimeConfig(threads=1),
    )


PRESETS: dict[str, Callable[[], Config]] = {
    f.__name__: f
    for f in (
        ablation_b16_stop,
        ablation_b16_ijepa,
        vit_b16_stop,
        vit_b16_ijepa,
        vit_l16_stop,
        vit_l16_ijepa,
        vit_h14_stop,
        vit_h14_ijepa,
        ablation_b16_stop_released,
        ablation_b16_ijepa_released,
        vit_b16_stop_released,
        vit_b16_ijepa_released,
        vit_l16_stop_released,
        vit_l16_ijepa_released,
        vit_h16_stop_released,
        vit_h16_ijepa_released,
        mae_b16,
        mae_b16_stop,
        continue_b16,
        small_images,
        tiny_cpu,
        tiny_cpu_quick,
        tiny_cpu_mae,
    )
}
