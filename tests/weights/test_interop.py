"""Files of others: the released layouts give the recorded features, anything else one line."""

import copy
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import stopmim
from helpers import GOLDEN, golden, seeded
from stopmim.base.errors import CheckpointError
from stopmim.method.encoder import VisionTransformer
from stopmim.method.model import MaskedImageModel
from stopmim.method.positions import Positions, StochasticPositions
from stopmim.weights.format import WeightFile
from stopmim.weights.load import format_of

FILES = [(kind, layout) for kind in ("stop", "ijepa") for layout in ("plain", "module")]
BRANCHES: list[tuple[Literal["target", "context"], str]] = [
    ("target", "target_encoder"),
    ("context", "encoder"),
]


def released(kind: str, layout: str) -> Path:
    return GOLDEN / f"ckpt_{kind}_{layout}.pth.tar"


def tree_of(kind: str, layout: str) -> dict[str, Any]:
    """A released file as nested dicts, without the optimizer, which is most of it."""
    tree = torch.load(released(kind, layout), weights_only=True)
    return {name: copy.copy(part) for name, part in tree.items() if name != "opt"}


def shallow(kind: str, layout: str) -> dict[str, Any]:
    """The same with one block in the encoders: a valid file with few enough keys to spoil each."""
    tree = tree_of(kind, layout)
    for part in ("encoder", "target_encoder"):
        tree[part] = {
            key: value
            for key, value in tree[part].items()
            if "blocks." not in key or "blocks.0." in key
        }
    return tree


def refused(file: Path | dict[str, Any], heads: int | None = 2) -> str:
    """The one line with which a file is refused, or what is in one: files take their time."""
    path = file if isinstance(file, Path) else Path("spoiled.pth.tar")
    tree = None if isinstance(file, Path) else file
    read = WeightFile(path, heads, content=tree)
    with pytest.raises(CheckpointError) as caught:
        format_of(read).encoder(read, "target") if tree else stopmim.load_encoder(path, heads=heads)
    message = str(caught.value)
    assert caught.value.exit_code == 4
    assert message.startswith(str(path))
    assert len(message.splitlines()) == 1
    assert caught.value.__cause__ is None  # no second traceback behind the line
    return message


def saved(tree: object, folder: Path) -> Path:
    path = folder / "spoiled.pth.tar"
    torch.save(tree, path)
    return path


# ------------------------------------------------------------------------------ what is read


@pytest.mark.parametrize(("branch", "recorded_as"), BRANCHES)
@pytest.mark.parametrize(("kind", "layout"), FILES)
@torch.no_grad()
def test_released_files_give_the_recorded_features(
    kind: str, layout: str, branch: Literal["target", "context"], recorded_as: str
) -> None:
    recorded = golden(f"ckpt_{kind}_expected")
    encoder = stopmim.load_encoder(released(kind, layout), branch, heads=2)
    images = recorded["images"]
    pooled, last4 = (
        recorded[f"{layout}.{recorded_as}.{name}"] for name in ("mean_pool", "last4_concat")
    )
    torch.testing.assert_close(encoder.features(images), pooled, atol=2e-5, rtol=0)
    torch.testing.assert_close(encoder.features(images, layers=4), last4, atol=2e-5, rtol=0)
    torch.testing.assert_close(encoder(images).mean(dim=1), pooled, atol=2e-5, rtol=0)


@pytest.mark.parametrize(("kind", "layout"), FILES)
@torch.no_grad()
def test_the_default_branch_is_the_ema_encoder_the_papers_evaluate(kind: str, layout: str) -> None:
    recorded = golden(f"ckpt_{kind}_expected")
    features = stopmim.load_encoder(released(kind, layout), heads=2).features(recorded["images"])
    target = recorded[f"{layout}.target_encoder.mean_pool"]
    context = recorded[f"{layout}.encoder.mean_pool"]
    torch.testing.assert_close(features, target, atol=2e-5, rtol=0)
    assert (features - context).abs().max() > 0.1


@pytest.mark.parametrize(("kind", "layout"), FILES)
def test_the_variant_is_recognised(kind: str, layout: str) -> None:
    positions = stopmim.load_model(released(kind, layout), heads=2).predictor.positions
    if kind == "stop":
        assert isinstance(positions, StochasticPositions)
        assert (positions.bias, positions.sigma) == ("project", 0.0625)  # their 0.25 is a std
        assert not positions.mask_token.requires_grad
    else:
        assert type(positions) is Positions
        assert positions.bias == "mask_token"


@pytest.mark.parametrize(("kind", "layout"), FILES)
def test_every_weight_of_the_file_is_in_the_model_and_the_other_way_round(
    kind: str, layout: str
) -> None:
    model, tree = stopmim.load_model(released(kind, layout), heads=2), tree_of(kind, layout)
    assert isinstance(model, MaskedImageModel)
    assert not any(module.training for module in model.modules())
    for name, module in model.named_children():
        weights = {key.removeprefix("module."): value for key, value in tree[name].items()}
        state = module.state_dict()
        assert weights.keys() == state.keys()
        assert all(torch.equal(weights[key], state[key]) for key in weights)


@torch.no_grad()
def test_a_released_model_predicts_with_the_noise_it_is_given() -> None:
    model = stopmim.load_model(released("stop", "plain"), heads=2)
    images = golden("ckpt_stop_expected")["images"]
    context, target = torch.arange(10).expand(4, -1), torch.arange(15, 20).expand(2, 4, -1)
    noise = model.predictor.draw(context, target, seeded())
    predicted = model.predict(images, context, target, noise.masked)
    assert predicted.shape == (2, 4, 5, 8)
    assert torch.equal(predicted, model.predict(images, context, target, noise))
    other = model.predictor.draw(context, target, seeded(1))
    assert (predicted - model.predict(images, context, target, other)).abs().max() > 1e-4


@torch.no_grad()
def test_heads_are_taken_as_given() -> None:
    images = golden("ckpt_stop_expected")["images"]
    two, four = (stopmim.load_encoder(released("stop", "plain"), heads=n) for n in (2, 4))
    assert isinstance(four, VisionTransformer)
    assert four.heads == 4
    assert (two.features(images) - four.features(images)).abs().max() > 1e-3


def test_a_file_of_a_known_width_needs_no_heads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    encoder = VisionTransformer(32, 8, 96, 1, 3)
    predictor = stopmim.Predictor(Positions(4, 24), 96, 1, 3)
    parts = stopmim.MaskedImageModel(encoder, predictor)
    tree = {name: part.state_dict() for name, part in parts.named_children()}
    loaded = stopmim.load_encoder(saved(tree, tmp_path), "context")
    assert isinstance(loaded, VisionTransformer)
    assert (loaded.heads, loaded.side, loaded.patch) == (3, 4, 8)
    images = torch.randn(2, 3, 32, 32, generator=seeded())
    assert torch.equal(loaded(images), encoder(images))


# ------------------------------------------------------------------------------ what is refused


def test_an_unknown_width_without_heads_is_refused() -> None:
    message = refused(released("stop", "plain"), heads=None)
    assert "width 8" in message
    assert "heads" in message


@pytest.mark.parametrize("heads", [0, -2, 3])
def test_heads_that_cannot_be_are_refused(heads: int) -> None:
    with pytest.raises((ValueError, CheckpointError), match="heads"):
        stopmim.load_encoder(released("stop", "plain"), heads=heads)


def test_an_unknown_branch_is_refused_rather_than_read_as_the_context() -> None:
    branch: Any = "target_encoder"  # its name in the released files
    with pytest.raises(ValueError, match=r"branch.*target_encoder"):
        stopmim.load_encoder(released("stop", "plain"), branch, heads=2)


def test_a_path_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    assert "no such file" in refused(tmp_path / "absent.pth.tar")


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    assert "neither a run, nor one of its checkpoints" in refused(tmp_path)


@pytest.mark.parametrize("part", ["encoder", "target_encoder", "predictor"])
@pytest.mark.parametrize(
    ("kind", "layout"),
    [("stop", "plain"), pytest.param("ijepa", "module", marks=pytest.mark.slow)],
)
def test_a_file_that_lacks_any_one_key_is_refused(
    kind: str, layout: str, part: str, tmp_path: Path
) -> None:
    tree = shallow(kind, layout)
    stopmim.load_encoder(saved(tree, tmp_path), heads=2)  # as it is, it is fine
    for key in tree[part]:
        spoiled = tree | {part: {k: v for k, v in tree[part].items() if k != key}}
        assert key.removeprefix("module.") in refused(spoiled)
    del tree[part]
    assert part in refused(saved(tree, tmp_path))


@pytest.mark.parametrize("part", ["encoder", "target_encoder", "predictor"])
def test_a_file_with_any_tensor_of_another_shape_is_refused(part: str) -> None:
    tree = shallow("stop", "plain")
    for key, value in tree[part].items():
        other = torch.cat([value, value[:1]])
        refused(tree | {part: tree[part] | {key: other}})


@pytest.mark.parametrize(
    ("part", "key"),
    [
        ("encoder", "patch_embed.proj.weight"),
        ("encoder", "pos_embed"),
        ("encoder", "blocks.0.mlp.fc1.weight"),
        ("predictor", "predictor_embed.weight"),
    ],
)
def test_a_file_whose_shapes_tell_of_no_architecture_is_refused(part: str, key: str) -> None:
    tree = shallow("stop", "plain")
    value = tree[part][key]
    longer = [torch.cat([value, value.narrow(d, 0, 1)], dim=d) for d in range(value.ndim)]
    empty = [value.narrow(d, 0, 0) for d in range(value.ndim)]
    for other in (*longer, *empty, value[None], value.flatten(), value.flatten()[0]):
        refused(tree | {part: tree[part] | {key: other}})


@pytest.mark.parametrize("extra", [torch.zeros(3), torch.zeros(()), 7, None])
@pytest.mark.parametrize("part", ["encoder", "target_encoder", "predictor"])
def test_a_file_with_a_key_too_many_is_refused(part: str, extra: object, tmp_path: Path) -> None:
    tree = shallow("stop", "plain")
    tree[part]["cls_token"] = extra
    assert "cls_token" in refused(saved(tree, tmp_path))


def test_a_weight_that_is_no_tensor_is_refused(tmp_path: Path) -> None:
    for part, key in (
        ("encoder", "pos_embed"),
        ("encoder", "norm.weight"),
        ("predictor", "predictor_embed.weight"),
        ("target_encoder", "blocks.0.attn.qkv.weight"),
    ):
        tree = shallow("stop", "plain")
        tree[part][key] = tree[part][key].tolist()
        refused(saved(tree, tmp_path))


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.7, 0.999])
def test_a_truncated_file_is_refused(share: float, tmp_path: Path) -> None:
    whole = released("stop", "module").read_bytes()
    path = tmp_path / "truncated.pth.tar"
    path.write_bytes(whole[: int(share * len(whole))])
    refused(path)


@pytest.mark.parametrize(
    "content",
    [
        b"\x89PNG\r\n\x1a\n" + bytes(100),
        b"not a checkpoint\n",
        bytes(64),
        b"PK\x03\x04" + bytes(60),
    ],
    ids=["png", "text", "zeros", "zip"],
)
def test_a_file_that_is_something_else_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "other.pth.tar"
    path.write_bytes(content)
    refused(path)


@pytest.mark.parametrize("tree", [[], {}, {"model": {}}, torch.zeros(3), {"encoder": 3}, "text"])
def test_a_pickle_of_something_else_is_refused(tree: object, tmp_path: Path) -> None:
    assert "encoder" in refused(saved(tree, tmp_path))


class Hostile:
    """A pickle that runs a command when it is read the careless way."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.canary}",)


@pytest.mark.parametrize("wrapped", ["torch", "pickle"])
def test_a_pickle_with_code_is_refused_and_nothing_is_executed(
    wrapped: str, tmp_path: Path
) -> None:
    canary, path = tmp_path / "canary", tmp_path / "hostile.pth.tar"
    tree = tree_of("stop", "plain") | {"epoch": Hostile(canary)}
    if wrapped == "torch":
        torch.save(tree, path)
    else:
        path.write_bytes(pickle.dumps(tree))
    assert b"touch" in path.read_bytes()
    refused(path)
    assert not canary.exists()
