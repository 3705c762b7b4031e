"""The public surface: names that others import, under the paths they have always had."""

import subprocess
import sys

import pytest

# Module path, then names in it that users rely on.
PUBLIC = {
    "stopmim": (
        "StochasticPositions Positions Predictor Noise Batch MaskedImageModel VisionTransformer "
        "Encoder Config Run load_encoder load_model pretrain"
    ),
    "stopmim.positions": "sincos_2d StochasticPositions Positions JitteredPositions",
    "stopmim.masking": "multiblock Masks random",
    "stopmim.schedules": "cosine warmup_cosine linear",
    "stopmim.presets": "PRESETS tiny_cpu vit_b16_stop small_images",
    "stopmim.config": "Config",
    "stopmim.data": "Images open_images loader",
    "stopmim.data.scenes": "Scenes",
    "stopmim.evals.tracking": "jaccard boundary_f propagate track",
    "stopmim.evals.lowshot": "fit_logistic",
    "stopmim.evals.knn": "knn_accuracy",
    "stopmim.evals.linear": "linear_probe",
    "stopmim.evals.features": "extract",
    "stopmim.evals.files": "write_features",
    "stopmim.evals.compare": "compare",
    "stopmim.ablate": "plan ablate",
    "stopmim.analysis": "analyse",
    "stopmim.identify": "identify",
    "stopmim.export": "export",
    "stopmim.plan": "configure",
    "stopmim.train": "pretrain",
    "stopmim.cli": "main",
}


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_are_found_where_they_always_were(module: str) -> None:
    """By import and as attributes, in a process of their own: nothing may have been imported."""
    names = PUBLIC[module].split()
    code = f"import {module}\n" + "".join(f"{module}.{name}\n" for name in names)
    code += f"from {module} import {', '.join(names)}\n"
    if module not in ("stopmim", "stopmim.config", "stopmim.train", "stopmim.cli"):
        # Found without an import of its own, too.
        code = f"import stopmim\n{module}.{names[0]}\n" + code
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_alias_is_the_module_it_stands_for() -> None:
    import stopmim
    from stopmim.method import masks, positions

    assert stopmim.masking is masks
    assert stopmim.positions is positions
    assert masks.__spec__ is not None
    assert masks.__spec__.name == "stopmim.method.masks"
