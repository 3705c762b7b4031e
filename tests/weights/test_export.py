"""Exports: whoever loads one gets our features, and nobody the wrong branch or predictor."""

import json
import os
import re
import resource
import runpy
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import stopmim
from helpers import GOLDEN, seeded
from stopmim.base.errors import CheckpointError, NonFiniteError, StorageError, UserError
from stopmim.cli import main
from stopmim.config.schema import resolve
from stopmim.method.build import build
from stopmim.method.encoder import VisionTransformer
from stopmim.method.model import MaskedImageModel
from stopmim.method.positions import StochasticPositions
from stopmim.runs.run import Run
from stopmim.weights.export import export
from stopmim.weights.formats.timm import from_timm
from stopmim.weights.inspect import identify
from stopmim.weights.vit import PREDICTOR_TAG, save_tagged, set_eps, tags, weights_of
from tiny import NoiseImages, tiny, tiny_mae

FORMATS = ("timm", "hf", "onnx", "ijepa", "safetensors")
FILES = {
    "timm": "model.safetensors",
    "hf": ".",
    "ijepa": "model.pth.tar",
    "safetensors": "model.safetensors",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Three updates, so that target and context encoder differ."""
    out = tmp_path_factory.mktemp("run") / "run"
    changes = {"optim.lr": 0.01, "optim.start_lr": 0.01, "optim.ema": [0.5, 0.5]}
    run = stopmim.pretrain(NoiseImages(), out, tiny(), stop_at=3, **changes)
    note(run, 0.3125, label="count", random_init=0.27, step=3)
    note(run, 0.125, label="shape")  # of which step, nobody knows: the run goes on
    return run


def note(run: Run, value: float, **facts: Any) -> None:
    run.add_result(**{"protocol": "knn", "name": "accuracy", "value": value} | facts)


@pytest.fixture(scope="module")
def exports(run: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("exports")
    return {to: export(run.path, to, folder / to) for to in FORMATS}


def pictures(size: int = 24) -> Tensor:
    return torch.randn(2, 3, size, size, generator=seeded())


def close(found: Tensor, want: Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(found, want, atol=atol, rtol=0)


def blocks_of(folder: Path) -> list[str]:
    """The Python code of the README of an export, in the order of the page."""
    return re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.S)


def code_of(folder: Path) -> str:
    """The block that loads the network."""
    words = ("create_model", "AutoModel.", "onnxruntime", '("model.safetensors")')
    (code,) = [code for code in blocks_of(folder) if any(word in code for word in words)]
    return code


def run_code(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **names: Any) -> Any:
    """What the README of an export tells people to type, typed in its folder."""
    (folder / "typed.py").write_text(code)
    monkeypatch.chdir(folder)
    with torch.no_grad():
        return runpy.run_path("typed.py", init_globals=names)


def odd_encoder(class_token: bool) -> VisionTransformer:
    """Nothing about it is usual, so that nothing can be guessed."""
    torch.manual_seed(0)
    encoder = VisionTransformer(24, 6, 48, 2, 4, 2.5, class_token)
    with torch.no_grad():
        for tensor in encoder.state_dict().values():
            tensor += 0.1 * torch.randn(tensor.shape, generator=seeded(1))
    set_eps(encoder, 1e-3)
    return encoder.eval()


def saved(encoder: VisionTransformer, folder: Path) -> Path:
    """As a file that tells neither heads nor epsilon, then as one of ours that does."""
    save_tagged(weights_of(encoder), folder / "odd.safetensors", tags(encoder))
    return folder / "odd.safetensors"


# ------------------------------------------------------------------------------ who loads them


@pytest.mark.parametrize("to", FILES)
@torch.no_grad()
def test_an_export_is_read_back_as_what_was_exported(
    to: str, run: Run, exports: dict[str, Path]
) -> None:
    encoder = stopmim.load_encoder(exports[to] / FILES[to])
    want = run.encoder("target")
    assert torch.equal(encoder.features(pictures(), 4), want.features(pictures(), 4))
    assert (want(pictures()) - run.encoder("context")(pictures())).abs().max() > 1e-3


@pytest.mark.parametrize("to", ["timm", "hf", "safetensors"])
def test_the_folder_of_an_export_is_an_encoder_too(
    to: str, run: Run, exports: dict[str, Path]
) -> None:
    encoder = stopmim.load_encoder(exports[to])
    assert torch.equal(encoder.features(pictures()), run.encoder().features(pictures()))
    again = identify(exports[to]).encoder
    assert torch.equal(again.features(pictures()), encoder.features(pictures()))


def test_a_checkpoint_that_lost_its_manifest_is_not_taken_for_an_export(
    run: Run, tmp_path: Path
) -> None:
    copy = shutil.copytree(run.checkpoint, tmp_path / "copy")
    (copy / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="manifest"):
        stopmim.load_encoder(copy)


@pytest.mark.parametrize("to", ["timm", "hf", "safetensors"])
@torch.no_grad()
def test_the_context_encoder_is_exported_on_request(to: str, run: Run, tmp_path: Path) -> None:
    folder = export(run.checkpoint, to, tmp_path / to, branch="context")
    encoder = stopmim.load_encoder(folder / FILES[to])
    assert torch.equal(encoder(pictures()), run.encoder("context")(pictures()))
    assert "the context encoder" in (folder / "README.md").read_text()


@pytest.mark.parametrize("to", FORMATS)
def test_the_code_of_a_card_runs_from_top_to_bottom(
    to: str, run: Run, exports: dict[str, Path], timm: Any, transformers: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    photo = exports[to] / "photo.jpg"
    Image.fromarray(NoiseImages(1).images[0]).save(photo)
    names = run_code("".join(blocks_of(exports[to])), exports[to], monkeypatch)
    if to == "ijepa":
        assert "blocks.0.attn.qkv.weight" in names["weights"]
    else:
        with torch.no_grad():
            want = stopmim.load_encoder(run.path).features(photo)
        close(torch.as_tensor(names["features"]), want, 0.02)  # timm's views are of 8 bits


def test_the_call_in_the_card_gives_a_timm_model_with_the_same_features(
    run: Run, exports: dict[str, Path], timm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = run_code(code_of(exports["timm"]), exports["timm"], monkeypatch, images=pictures())
    with torch.no_grad():
        close(names["features"], run.encoder().features(pictures()))
        close(from_timm(names["model"])(pictures()), run.encoder()(pictures()))


def test_the_code_in_the_card_loads_a_hugging_face_model_and_its_processor(
    run: Run,
    exports: dict[str, Path],
    transformers: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    folder = exports["hf"]
    picture = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    names = run_code(code_of(folder), folder, monkeypatch, opened=lambda _: picture)
    pixels, model = names["inputs"]["pixel_values"], names["model"]
    assert type(model).__name__ == "IJepaModel"
    assert pixels.shape == (1, 3, 24, 24)
    white = names["processor"](images=np.full((40, 60, 3), 255, np.uint8), return_tensors="pt")
    expected = [
        (1 - m) / s for m, s in zip((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), strict=True)
    ]
    close(white["pixel_values"].mean(dim=(0, 2, 3)), torch.tensor(expected))
    with torch.no_grad():
        close(names["features"], run.encoder().features(pixels))
        close(model(pictures()).last_hidden_state, run.encoder()(pictures()))
    model.save_pretrained(tmp_path)  # and back again, through transformers
    assert torch.equal(stopmim.load_encoder(tmp_path)(pictures()), run.encoder()(pictures()))


@pytest.mark.slow
def test_onnx_of_an_encoder_with_a_class_token_takes_any_batch(tmp_path: Path) -> None:
    """The exporter itself compares batches of two and three."""
    torch.manual_seed(0)
    encoder = VisionTransformer(24, 8, 96, 1, 3, class_token=True)
    torch.save(encoder.state_dict(), tmp_path / "a.pth")
    out = export(tmp_path / "a.pth", "onnx", tmp_path / "out")
    assert (out / "model.onnx").stat().st_size > 100_000


def test_onnx_gives_the_same_features_for_any_batch(
    run: Run, exports: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    code = code_of(exports["onnx"])
    for n in (1, 5):
        images = torch.randn(n, 3, 24, 24, generator=seeded(n))
        names = run_code(code, exports["onnx"], monkeypatch, images=images.numpy())
        with torch.no_grad():
            close(torch.from_numpy(names["features"]), run.encoder().features(images), 1e-4)
            close(torch.from_numpy(names["tokens"]), run.encoder()(images), 1e-4)


@pytest.mark.parametrize("class_token", [False, True])
def test_heads_epsilon_and_width_of_an_odd_encoder_reach_timm_and_hugging_face(
    class_token: bool,
    timm: Any,
    transformers: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoder = odd_encoder(class_token)
    file = saved(encoder, tmp_path)
    with torch.no_grad():
        want = encoder.features(pictures(), pool=encoder.pool)
        assert torch.equal(stopmim.load_encoder(file)(pictures()), encoder(pictures()))
        folder = export(file, "timm", tmp_path / "timm")
        close(run_code(code_of(folder), folder, monkeypatch, images=pictures())["features"], want)
        folder = export(file, "hf", tmp_path / "hf")
        model = transformers.AutoModel.from_pretrained(folder, add_pooling_layer=False).eval()
        close(model(pictures()).last_hidden_state[:, -16:], encoder(pictures()))
        again = stopmim.load_encoder(folder)
        close(again.features(pictures(), pool=encoder.pool), want)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_base_patch16_224", {}),  # MAE
        ("vit_small_patch16_224", {}),  # DINO
        ("vit_huge_patch14_gap_224", {"depth": 1, "fc_norm": False, "img_size": 28}),  # I-JEPA
    ],
)
def test_models_of_timm_come_back_to_timm_with_the_same_features(
    name: str, options: dict[str, Any], timm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    small = {"depth": 2, "num_classes": 0, "img_size": 32}
    model = timm.create_model(name, **small | options).eval()
    images = pictures(options.get("img_size", 32))
    with torch.no_grad():
        torch.save(model.state_dict(), tmp_path / "theirs.pth")
        ours = stopmim.load_encoder(tmp_path / "theirs.pth")
        close(ours(images), model.forward_features(images)[:, model.num_prefix_tokens :], 2e-5)
        folder = export(tmp_path / "theirs.pth", "timm", tmp_path / "timm")
        close(
            run_code(code_of(folder), folder, monkeypatch, images=images)["features"], model(images)
        )


# ------------------------------------------------------------------------------ I-JEPA's layout


def test_the_layout_of_ijepa_has_the_keys_of_the_released_files(exports: dict[str, Path]) -> None:
    ours = torch.load(exports["ijepa"] / "model.pth.tar", weights_only=True)
    theirs = torch.load(GOLDEN / "ckpt_stop_module.pth.tar", weights_only=True)
    assert {"encoder", "predictor", "target_encoder", "opt", "scaler", "epoch"} <= ours.keys()
    for part in ("encoder", "target_encoder", "predictor"):
        blocks = re.compile(r"blocks\.[1-9]")  # as many as there are
        names = [{k for k in tree[part] if not blocks.search(k)} for tree in (ours, theirs)]
        assert names[0] == names[1]


def test_timm_takes_the_context_encoder_out_of_the_layout_of_ijepa(
    run: Run, exports: dict[str, Path], timm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why `--to timm` is another export: it has the target encoder."""
    from timm.models.vision_transformer import checkpoint_filter_fn

    code = code_of(exports["timm"])
    model = run_code(code, exports["timm"], monkeypatch, images=pictures())["model"]
    tree = torch.load(exports["ijepa"] / "model.pth.tar", weights_only=True)
    model.load_state_dict(checkpoint_filter_fn(tree, model))
    with torch.no_grad():
        close(model(pictures()), run.encoder("context").features(pictures()))
        assert (model(pictures()) - run.encoder().features(pictures())).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("kind", "first"), [("sincos", "mask_token"), ("stochastic", "predictor_pos_embed")]
)
def test_the_predictor_stays_the_one_it_is(kind: str, first: str, tmp_path: Path) -> None:
    config = tiny(**{"positions.kind": kind, "predictor.heads": 2})
    run = stopmim.pretrain(NoiseImages(), tmp_path / "run", config, stop_at=1)
    file = export(run.path, "ijepa", tmp_path / "out") / "model.pth.tar"
    tree = torch.load(file, weights_only=True)
    assert next(iter(tree["predictor"])) == f"module.{first}"  # all that their files tell it by
    model = stopmim.load_model(file)
    assert type(model.predictor.positions) is type(run.model().predictor.positions)
    state = run.model().state_dict()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert predicted(model).equal(predicted(run.model()))
    # Somebody sorts the keys: their order lies now, the tag does not.
    tree["predictor"] = dict(sorted(tree["predictor"].items()))
    torch.save(tree, file)
    again = stopmim.load_model(file).predictor.positions
    assert isinstance(again, StochasticPositions) == (kind == "stochastic")
    if isinstance(again, StochasticPositions):
        assert (again.sigma, again.bias) == (0.25, "mask_token")


@torch.no_grad()
def predicted(model: MaskedImageModel) -> Tensor:
    context, target = torch.arange(10).expand(2, -1), torch.arange(15, 20).expand(2, 2, -1)
    noise = model.predictor.draw(context, target, seeded())
    return model.predict(pictures(), context, target, noise)


@pytest.mark.parametrize(
    "tag",
    [
        {"positions": "sincos"},
        {"positions": "odd", "bias": "mask_token", "tokens": "masked", "heads": 3},
        {"positions": "stochastic", "sigma": -1, "bias": "mask_token", "tokens": "masked"},
        "stop",
        7,
    ],
)
def test_a_tag_that_is_none_of_ours_is_one_line(
    tag: object, exports: dict[str, Path], tmp_path: Path
) -> None:
    tree = torch.load(exports["ijepa"] / "model.pth.tar", weights_only=True)
    torch.save(tree | {PREDICTOR_TAG: tag}, tmp_path / "x.pth.tar")
    with pytest.raises(CheckpointError) as caught:
        stopmim.load_model(tmp_path / "x.pth.tar")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"positions.kind": "learned"}, "learned positions"),
        ({"positions.base": "learned"}, "learned positions"),
        ({"positions.covariance": "untied"}, "untied noise"),
        ({"positions.covariance": "fixed"}, "a fixed covariance"),
        ({"positions.covariance": "conditioned"}, "a conditioned covariance"),
        ({"positions.kind": "jitter"}, "jittered positions"),
        ({"class_token": True}, "a class token"),
    ],
)
def test_what_the_layout_of_ijepa_cannot_hold_is_refused(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    run = stopmim.pretrain(NoiseImages(), tmp_path / "run", tiny(**changes), stop_at=1)
    with pytest.raises(CheckpointError, match=said):
        export(run.path, "ijepa", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]  # nothing is left behind


# ------------------------------------------------------------------------------ the folder


@pytest.mark.parametrize("to", FORMATS)
def test_a_card_says_what_how_trained_and_how_good(
    to: str, run: Run, exports: dict[str, Path]
) -> None:
    text = (exports[to] / "README.md").read_text()
    assert text.startswith("---\nlicense: other\n")
    assert "StoP, sigma 0.25" in text
    assert "step 3 of 2 epochs with batch 8" in text
    assert "Data: 40 images" in text
    assert "| knn count | accuracy | 31.2 % | 27.0 % |" in text
    assert "Results of the target encoder at step 3." in text
    assert "12.5 %" not in text
    assert ("the target (EMA) encoder" in text) == (to != "ijepa")


def results_in(folder: Path) -> list[dict[str, str]]:
    """The rows of the table in the README of an export; none if it has no table."""
    text = (folder / "README.md").read_text().partition("## Results")[2]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line[:1] == "|"]
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]


@pytest.mark.slow
def test_a_card_has_only_the_results_of_the_weights_that_were_exported(tmp_path: Path) -> None:
    run = stopmim.pretrain(NoiseImages(), tmp_path / "run", tiny())
    older = run.path / "checkpoints" / "step-00000009"
    note(run, 0.1, label="a", step=9, branch="target")
    note(run, 0.2, label="b", step=10, branch="target")
    note(run, 0.3, label="c", step=10, branch="context")
    note(run, 0.4, label="d", branch="target")  # before steps were noted, of a run that had ended
    note(run, 0.5, label="e", step=None, encoder="random:vit_micro4@24")
    note(run, 0.6, label="f", step=10, branch="target", A="x", B="y")

    def values(path: Path, branch: Literal["target", "context"] = "target") -> list[str]:
        folder = export(path, "timm", tmp_path / "out", branch=branch)
        found = [row["value"] for row in results_in(folder)]
        shutil.rmtree(folder)
        return found

    assert values(run.path) == values(run.checkpoint) == ["20.0 %", "40.0 %"]
    assert values(run.path, "context") == ["30.0 %"]
    assert values(older) == ["10.0 %"]
    assert values(older, "context") == []


def test_the_one_encoder_of_a_run_of_pixels_has_the_results_of_either_branch(
    tmp_path: Path,
) -> None:
    run = stopmim.pretrain(NoiseImages(), tmp_path / "run", tiny_mae(), stop_at=1)
    note(run, 0.2, step=1, branch="target")
    folder = export(run.path, "timm", tmp_path / "out", branch="context")
    assert [row["value"] for row in results_in(folder)] == ["20.0 %"]


def test_a_card_tells_evaluations_apart_and_has_the_newest_of_those_it_cannot(
    run: Run, tmp_path: Path
) -> None:
    shutil.copytree(run.path, tmp_path / "run")
    run = Run(tmp_path / "run")
    (run.path / "results.jsonl").unlink()
    usual = {"step": 3, "test_data": "a|b (9 images)", "selection": "held-out", "train": 50}
    usual |= {"train_data": "c", "seed": 0}
    several: list[dict[str, Any]] = [
        {},
        {"selection": "paper"},
        {"test_data": "d (9 images)"},
        {"setting": "10/class, lambda 0.0025"},
        {"setting": "25/class, lambda 0.0025"},
        {"train": 20},
        {"size": 48},
    ]
    for value in (0.25, 0.75):
        for other in several:
            note(run, value, **usual | other)
    rows = results_in(export(run.path, "timm", tmp_path / "same"))
    assert len({tuple(row.values()) for row in rows}) == len(rows) == len(several)
    assert {row["value"] for row in rows} == {"75.0 %"}
    assert [row["chosen on"] for row in rows[:2]] == ["held-out", "paper"]
    assert rows[0]["data"] == "a\\|b (9 images)"
    assert not {"seed", "fitted on"} & rows[0].keys()
    note(run, 0.5, **usual | {"seed": 1})
    note(run, 0.5, **usual | {"train_data": "e"})
    rows = results_in(export(run.path, "timm", tmp_path / "others"))
    assert [(row["seed"], row["fitted on"]) for row in rows[-3:]] == [
        ("0", "c"), ("1", "c"), ("0", "e"),
    ]  # fmt: skip


def test_a_card_without_results_says_how_to_get_some(run: Run, tmp_path: Path) -> None:
    shutil.copytree(run.path, tmp_path / "a run")
    copy = Run(tmp_path / "a run").checkpoint
    folder = export(copy, "timm", tmp_path / "before", branch="context")
    text = (folder / "README.md").read_text()
    assert results_in(folder) == []
    found = re.search(r"```sh\nstopmim eval suite (.*)\n```", text)
    assert found
    words = ["--data", "scenes:48:24", "--label", "count"]
    assert main(["eval", "knn", *shlex.split(found[1]), *words]) == 0
    (row,) = results_in(export(copy, "timm", tmp_path / "after", branch="context"))
    assert row["data"] == "scenes:48:24:1 (48 images)"


def test_a_safetensors_export_has_no_pickle_and_says_who_wrote_it(exports: dict[str, Path]) -> None:
    file = exports["safetensors"] / "model.safetensors"
    with safe_open(file, "pt") as opened:
        words = opened.metadata()
    assert json.loads(words["stopmim.encoder"]) == {"heads": 3, "eps": 1e-6}
    assert words["stopmim.version"] == stopmim.__version__
    assert "blocks.0.attn.qkv.weight" in load_file(file)


def test_an_export_never_writes_over_anything(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for out in ("mine", "file"):
        with pytest.raises(UserError, match="exists already"):
            export(run.path, "timm", tmp_path / out)
    with pytest.raises(StorageError, match="cannot write"):
        export(run.path, "timm", tmp_path / "file" / "below")
    assert (tmp_path / "file").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    assert export(run.path, "timm", tmp_path / "empty") == tmp_path / "empty"


def test_onnxruntime_sends_and_leaves_nothing(exports: dict[str, Path]) -> None:
    assert exports["onnx"].exists()
    assert os.environ["ORT_DISABLE_TELEMETRY"] == "1"  # else it writes TMPDIR/.ses


@pytest.mark.parametrize("to", ["timm", "hf", "ijepa", "safetensors"])
def test_a_full_disk_is_one_line_and_nothing_is_left(to: str, run: Run, tmp_path: Path) -> None:
    """Writers of tensors have errors of their own for it."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, usual[1]))
        with pytest.raises(StorageError, match=r"^\S+out: cannot write: no room on the disk$"):
            export(run.path, to, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert list(tmp_path.iterdir()) == []


def test_the_folder_for_timm_has_a_config_unless_json_cannot_say_it(tmp_path: Path) -> None:
    usual, odd = VisionTransformer(24, 6, 48, 2, 4, 2.5), odd_encoder(class_token=False)
    for name, encoder in {"usual": usual, "odd": odd}.items():
        (tmp_path / name).mkdir()
        folder = export(saved(encoder, tmp_path / name), "timm", tmp_path / name / "timm")
        assert (folder / "config.json").exists() == (name == "usual")
        assert ("hf-hub:" in (folder / "README.md").read_text()) == (name == "usual")
        assert torch.equal(stopmim.load_encoder(folder)(pictures()), encoder(pictures()))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("RuntimeError('operator torchvision::nms does not exist')", "do not match .*nms.* pip"),
        ("ImportError('No module named torchvision')", r"pip install .stopmim\[timm\]"),
    ],
)
def test_a_timm_that_cannot_be_imported_says_what_to_install(
    error: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its import fails as it does beside a torchvision of another build."""
    (tmp_path / "timm.py").write_text(f"raise {error}")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "timm"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UserError, match=said) as caught:
        stopmim.load_encoder("timm:vit_tiny_patch16_224")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("module", "options", "extra"),
    [
        ("onnxruntime", {"to": "onnx"}, "onnx"),
        ("huggingface_hub", {"to": "hf", "repo": "a/b"}, "hf"),
    ],
)
def test_a_missing_library_names_the_smallest_extra_that_has_it(
    module: str, options: Any, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`interop` would bring torchvision along, which may replace torch."""
    file = saved(VisionTransformer(24, 6, 48, 2, 4), tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf'pip install "stopmim\[{extra}\]"'):
        export(file, out=tmp_path / "out", **options)


def test_a_branch_of_a_file_that_has_both_is_refused(run: Run, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="both encoders"):
        export(run.path, "ijepa", tmp_path / "out", branch="context")


def test_encoders_without_plain_positions_are_not_exported(tmp_path: Path) -> None:
    from stopmim.weights.formats.data2vec import RelativeTransformer

    torch.save(RelativeTransformer(2, 8, 24, 1, 3, 48).state_dict(), tmp_path / "d2v.pth")
    with pytest.raises(CheckpointError, match="only plain ViTs"):
        export(tmp_path / "d2v.pth", "hf", tmp_path / "out")


# ------------------------------------------------------------------------------ inspect


def test_inspect_says_what_a_run_is(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(run.path)]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["project"] == "stopmim run"
    assert lines["encoder"].startswith("vit_micro4, patch 4, width 96, depth 4, 3 heads")
    assert lines["images"] == "24x24 pixels, a grid of 6x6"
    assert lines["predictor"].startswith("I-JEPA, StoP, sigma 0.25 (a variance)")
    assert lines["step"] == "3"
    assert identify(run.checkpoint).project == "stopmim checkpoint"


@pytest.mark.parametrize(
    ("name", "project", "predictor"),
    [
        ("stop", "StoP", "I-JEPA, StoP as released"),
        ("ijepa", "I-JEPA", "I-JEPA, sine-cosine positions"),
    ],
)
def test_inspect_tells_stop_from_ijepa(name: str, project: str, predictor: str) -> None:
    found = identify(GOLDEN / f"ckpt_{name}_module.pth.tar", heads=2).facts()
    assert found["project"].startswith(project)
    assert found["predictor"].startswith(predictor)
    assert found["epoch"] == "1"
    assert ("sigma 0.0625" in found["predictor"]) == (name == "stop")


@pytest.mark.parametrize("covariance", ["tied", "untied", "fixed"])
def test_inspect_calls_a_covariance_as_the_config_does(covariance: str) -> None:
    model = build(resolve(tiny(**{"positions.covariance": covariance})))
    assert f" {covariance} covariance" in model.describe()


def test_an_export_for_ijepa_says_how_many_epochs_were_made(tmp_path: Path) -> None:
    run = stopmim.pretrain(NoiseImages(16), tmp_path / "run", tiny(), stop_at=5)  # two updates each
    assert identify(run.path).epoch == 2
    for name, source, epoch in [("a", run.path, 2), ("b", run.checkpoint, None)]:
        export(source, "ijepa", tmp_path / name)
        assert identify(tmp_path / name / "model.pth.tar").epoch == epoch  # never a false 0


def test_inspect_names_the_project_as_far_as_keys_tell(tmp_path: Path) -> None:
    def project(tree: object) -> str:
        torch.save(tree, tmp_path / "x.pth")
        return identify(tmp_path / "x.pth", heads=3).project

    torch.manual_seed(0)
    fixed = VisionTransformer(16, 8, 24, 1, 3, class_token=True).state_dict()
    bare = VisionTransformer(16, 8, 24, 1, 3).state_dict()
    learned = fixed | {"pos_embed": torch.randn(1, 5, 24)}
    wrapped = {f"backbone.{key}": value for key, value in learned.items()}
    assert project({"model": fixed}) == "MAE"
    assert "decoder" in project({"model": fixed | {"decoder_pos_embed": torch.zeros(1, 5, 8)}})
    assert project(bare) == "StoP or I-JEPA, the encoder alone"
    assert project(learned) == "a plain ViT: DINO, iBOT or timm"
    assert project({"teacher": wrapped, "student": wrapped, "epoch": 5}) == "DINO"
    assert project({"teacher": wrapped, "ibot_loss": {}}) == "iBOT"
    trunk = {"classy_state_dict": {"base_model": {"model": {"trunk": bare}}}}
    assert project(trunk) == "VISSL"


def test_inspect_of_an_export_knows_it(exports: dict[str, Path]) -> None:
    for to, file in FILES.items():
        found = identify(exports[to] / file)
        assert found.project.startswith("Hugging Face, ijepa" if to == "hf" else "stopmim export")
        assert (found.model is not None) == (to == "ijepa")


@pytest.mark.parametrize("value", [1e300, float("inf"), float("nan")])
def test_weights_too_large_for_float32_are_never_exported(
    exports: dict[str, Path], tmp_path: Path, value: float
) -> None:
    """1e300 is finite in a file of float64, and would be infinite in the export."""
    file = tmp_path / "double.safetensors"
    weights = {key: x.double() for key, x in load_file(whole_file(exports["safetensors"])).items()}
    weights["norm.weight"][0] = value
    with safe_open(whole_file(exports["safetensors"]), "pt") as source:
        save_file(weights, file, source.metadata())
    with pytest.raises(CheckpointError, match=r"norm\.weight has values that are not finite"):
        export(file, "timm", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_weights_that_are_written_are_looked_at_once_more(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a format makes of its file on the way."""
    found = identify(run.path)
    with torch.no_grad():
        next(found.encoder.parameters()).view(-1)[0] = float("inf")  # type: ignore[attr-defined]
    monkeypatch.setattr("stopmim.weights.export.identify", lambda *_: found)
    with pytest.raises(NonFiniteError, match="nothing was written") as caught:
        export(run.path, "safetensors", tmp_path / "out")
    assert caught.value.exit_code == 6
    assert list(tmp_path.iterdir()) == []


def whole_file(folder: Path) -> Path:
    return next(folder.glob("*.safetensors"))
