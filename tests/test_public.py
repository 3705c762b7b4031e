"""The public surface: names that others import, under the paths they have always had."""

import json
import subprocess
import sys

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


# Found as attributes of `stopmim` without an import of their own, too.
LAZY = [m for m in PUBLIC if m not in ("stopmim", "stopmim.config", "stopmim.train", "stopmim.cli")]
TRY = """
import gc, json, sys
gc.disable()  # it would look through all of torch again and again
for code in json.load(sys.stdin):
    for name in [name for name in sys.modules if name.split(".")[0] == "stopmim"]:
        del sys.modules[name]  # as in a new process, but for torch, which takes seconds
    exec(code, {})
"""


def test_public_names_are_found_where_they_always_were() -> None:
    codes = []
    for module, text in PUBLIC.items():
        names = text.split()
        lines = [f"import {module}", *(f"{module}.{name}" for name in names)]
        codes.append("\n".join([*lines, f"from {module} import {', '.join(names)}"]))
    codes += [f"import stopmim\n{module}.{PUBLIC[module].split()[0]}\n" for module in LAZY]
    subprocess.run([sys.executable, "-c", TRY], input=json.dumps(codes), text=True, check=True)


def test_an_alias_is_the_module_it_stands_for() -> None:
    import stopmim
    from stopmim.method import masks, positions

    assert stopmim.masking is masks
    assert stopmim.positions is positions
    assert masks.__spec__ is not None
    assert masks.__spec__.name == "stopmim.method.masks"
