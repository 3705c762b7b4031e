"""Encoders of others: ours gives the features theirs does, and nothing is loaded by half."""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import stopmim
from helpers import seeded
from stopmim.base.errors import CheckpointError, UserError
from stopmim.gpu.blocks import take
from stopmim.method.encoder import Encoder, VisionTransformer
from stopmim.method.positions import sincos_2d
from stopmim.weights.format import WeightFile
from stopmim.weights.formats.data2vec import RelativeTransformer
from stopmim.weights.formats.timm import from_timm
from stopmim.weights.load import format_of

Tree = dict[str, Any]


def pictures(height: int = 32, width: int = 32) -> Tensor:
    return torch.randn(2, 3, height, width, generator=seeded())


def scrambled(model: nn.Module) -> nn.Module:
    """With random values where an untrained model has zeros and ones, so that all of it counts."""
    generator = seeded(1)
    with torch.no_grad():
        for tensor in filter(Tensor.is_floating_point, model.state_dict().values()):
            tensor += 0.1 * torch.randn(tensor.shape, generator=generator)
    return model.eval()


def vit(
    timm: Any, name: str = "vit_small_patch16_224", *, seed: int = 0, **changes: Any
) -> nn.Module:
    torch.manual_seed(seed)
    options = {"depth": 3, "num_classes": 0, "img_size": 32} | changes
    return scrambled(timm.create_model(name, **options))


@pytest.fixture(scope="module")
def dino(timm: Any) -> Any:
    """DINO's S/16 with three blocks; its positions are MAE's, which are checked."""
    return fixed_positions(vit(timm))


def fixed_positions(model: Any) -> nn.Module:
    """With the table that MAE, I-JEPA and StoP never train."""
    side = int((model.pos_embed.shape[1]) ** 0.5)
    table = F.pad(sincos_2d(side, model.embed_dim), (0, 0, model.num_prefix_tokens, 0))
    with torch.no_grad():
        model.pos_embed.copy_(table[None])
    return model


def theirs(model: Any, images: Tensor, layers: int, pool: Literal["mean", "cls"]) -> Tensor:
    if pool == "mean":
        blocks = model.get_intermediate_layers(images, layers, norm=True)
        return torch.cat([patches.mean(dim=1) for patches in blocks], dim=1)
    blocks = model.get_intermediate_layers(images, layers, return_prefix_tokens=True, norm=True)
    return torch.cat([prefix[:, 0] for _, prefix in blocks], dim=1)


def assert_close(found: Tensor, want: Tensor) -> None:
    """To 1e-5 of the largest value: another kernel embeds the patches, and rounds otherwise."""
    atol = 1e-5 * max(1.0, float(want.abs().max()))
    torch.testing.assert_close(found, want, atol=atol, rtol=0)


@torch.no_grad()
def assert_same(encoder: Encoder, model: Any, size: tuple[int, int] = (32, 32)) -> None:
    images = pictures(*size)
    tokens = model.forward_features(images)[:, model.num_prefix_tokens :]
    assert_close(encoder(images), tokens)
    pools: list[Literal["mean", "cls"]] = ["mean", "cls"] if model.num_prefix_tokens else ["mean"]
    for pool, layers in product(pools, (1, 3)):
        ours = encoder.features(images, layers, pool)
        want = theirs(model, images, layers, pool)
        assert_close(ours, want)


def saved(tree: object, folder: Path, name: str = "file.pth") -> Path:
    torch.save(tree, folder / name)
    return folder / name


def refused(file: Path | str | Tree, heads: int | None = None) -> str:
    """The one line with which a file is refused, or what is in one: files take their time."""
    path, tree = (Path("file.pth"), file) if isinstance(file, dict) else (file, None)
    read = WeightFile(Path(path), heads, content=tree)
    with pytest.raises(CheckpointError) as caught:
        format_of(read).encoder(read, "target") if tree else stopmim.load_encoder(path, heads=heads)
    message = str(caught.value)
    assert caught.value.exit_code == 4
    assert message.startswith(str(path))
    assert len(message.splitlines()) == 1
    assert caught.value.__cause__ is None
    return message


# ------------------------------------------------------------------------------ the class token


def with_class() -> VisionTransformer:
    torch.manual_seed(0)
    encoder = VisionTransformer(32, 8, 24, 3, 3, class_token=True)
    scrambled(encoder)
    return encoder


@torch.no_grad()
def test_the_class_token_is_seen_by_the_patches_but_not_among_them() -> None:
    encoder, images = with_class(), pictures()
    tokens, pooled = encoder(images), encoder.features(images, pool="cls")
    assert tokens.shape == (2, 16, 24)
    torch.testing.assert_close(encoder.features(images), tokens.mean(dim=1))
    assert encoder.cls_token is not None
    encoder.cls_token.add_(torch.randn(24, generator=seeded(2)))
    assert (encoder(images) - tokens).abs().max() > 1e-3
    assert (encoder.features(images, pool="cls") - pooled).abs().max() > 1e-3


@torch.no_grad()
def test_hidden_patches_stay_hidden_from_the_class_token_too() -> None:
    encoder, images = with_class(), pictures()
    index = torch.tensor([[0, 3, 5], [1, 2, 15]])
    tokens = encoder(images, index)
    assert tokens.shape == (2, 3, 24)
    images[0, :, 24:, 24:] += 5.0  # patch 15, which only the second image shows
    assert torch.equal(encoder(images, index)[0], tokens[0])
    everything = torch.arange(16).expand(2, -1)
    torch.testing.assert_close(encoder(images, everything), encoder(images))


@torch.no_grad()
def test_another_image_size_resizes_the_patches_and_leaves_the_class_entry() -> None:
    encoder, images = with_class(), pictures(64, 40)
    before = encoder.positions(8, 5)
    assert before.shape == (1, 40, 24)
    tokens, pooled = encoder(images), encoder.features(images, pool="cls")
    encoder.pos_embed[:, 0] += torch.randn(24, generator=seeded(3))
    assert torch.equal(encoder.positions(8, 5), before)
    assert (encoder(images) - tokens).abs().max() > 1e-4
    assert (encoder.features(images, pool="cls") - pooled).abs().max() > 1e-4


def test_which_pool_is_natural_is_told_by_the_encoder() -> None:
    plain = VisionTransformer(32, 8, 24, 1, 3)
    assert (with_class().pool, plain.pool) == ("cls", "mean")
    with pytest.raises(ValueError, match="no class token"):
        plain.features(pictures(), pool="cls")
    other: Any = "max"
    with pytest.raises(ValueError, match="max"):
        plain.features(pictures(), pool=other)


def test_the_table_of_a_new_encoder_is_that_of_mae() -> None:
    encoder = VisionTransformer(32, 8, 24, 1, 3, class_token=True)
    assert encoder.pos_embed.shape == (1, 17, 24)
    assert not encoder.pos_embed[0, 0].any()
    assert torch.equal(encoder.pos_embed[0, 1:], sincos_2d(4, 24))
    assert {"cls_token", "pos_embed"} <= encoder.state_dict().keys()


# ------------------------------------------------------------------------------ files


def bare(model: nn.Module) -> Tree:
    return model.state_dict()


def under(prefix: str, state: Tree) -> Tree:
    return {prefix + key: value for key, value in state.items()}


HEAD = {"head.mlp.0.weight": torch.zeros(5, 4), "head.last_layer.weight_g": torch.ones(3, 1)}
DECODER = {
    "mask_token": torch.zeros(1, 1, 8),
    "decoder_pos_embed": torch.zeros(1, 5, 8),
    "decoder_embed.weight": torch.zeros(8, 384),
    "decoder_blocks.0.norm1.weight": torch.zeros(8),
    "decoder_norm.weight": torch.zeros(8),
    "decoder_pred.bias": torch.zeros(768),
}
ARGS = argparse.Namespace(arch="vit_small", lr=5e-4, epochs=100)  # MAE, DINO, iBOT save theirs
LAYOUTS: dict[str, Callable[[Tree], Tree]] = {
    "dino backbone": lambda s: s,
    "mae": lambda s: {"model": s},
    "mae full": lambda s: {"model": s | DECODER, "optimizer": {}, "epoch": 3, "args": ARGS},
    "dino full": lambda s: {
        "student": under("module.", under("backbone.", s) | HEAD),
        "teacher": under("backbone.", s) | HEAD,
        "optimizer": {},
        "epoch": 100,
        "args": ARGS,
    },
    "ibot full": lambda s: {
        "student": under("module.backbone.", s | {"masked_embed": torch.zeros(1, 384)}),
        "teacher": under("module.backbone.", s | {"masked_embed": torch.zeros(1, 384)}),
        "ibot_loss": {"center": torch.zeros(1, 8)},
    },
    "ibot teacher": lambda s: {"state_dict": s},
    "timm classifier": lambda s: (
        s | {"head.weight": torch.zeros(7, 384), "head.bias": torch.ones(7)}
    ),
    "vissl": lambda s: {"classy_state_dict": {"base_model": {"model": {"trunk": s, "heads": {}}}}},
    "ddp": lambda s: {"state_dict": under("module.", s)},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_published_layout_gives_the_features_of_the_model_it_holds(
    layout: str, dino: Any, tmp_path: Path
) -> None:
    path = saved(LAYOUTS[layout](bare(dino)), tmp_path)
    encoder = stopmim.load_encoder(path)
    assert isinstance(encoder, VisionTransformer)
    assert (encoder.pool, encoder.heads, encoder.training) == ("cls", 6, False)
    assert_same(encoder, dino)


@pytest.mark.parametrize("size", [(64, 64), (48, 80)])
def test_other_image_sizes_resize_the_table_as_the_published_codes_do(
    size: tuple[int, int], timm: Any, tmp_path: Path
) -> None:
    """Plain bicubic, the class entry apart. (timm resizes with antialiasing, another kernel.)"""
    options: Tree = {"img_size": 64, "depth": 3}
    state = bare(vit(timm, **options))
    rows, cols = size[0] // 16, size[1] // 16
    grid = state["pos_embed"][0, 1:].T.view(1, 384, 4, 4)
    grid = F.interpolate(grid, size=(rows, cols), mode="bicubic", align_corners=False)
    table = torch.cat([state["pos_embed"][0, :1], grid.flatten(2)[0].T])[None]
    model = vit(timm, **options | {"img_size": size})
    model.load_state_dict(state | {"pos_embed": table})
    assert_same(stopmim.load_encoder(saved(state, tmp_path)), model, size)


def test_a_safetensors_file_is_read_as_a_pickle_is(dino: Any, tmp_path: Path) -> None:
    save_file(
        {key: value.contiguous() for key, value in bare(dino).items()}, tmp_path / "x.safetensors"
    )
    assert_same(stopmim.load_encoder(tmp_path / "x.safetensors"), dino)


def test_a_class_free_trunk_is_read_as_what_it_is(timm: Any, tmp_path: Path) -> None:
    model = vit(timm, class_token=False, global_pool="avg", fc_norm=False)
    encoder = stopmim.load_encoder(saved(LAYOUTS["vissl"](bare(model)), tmp_path))
    assert encoder.pool == "mean"
    assert_same(encoder, model)


def test_the_teacher_is_the_default_and_the_student_the_context(timm: Any, tmp_path: Path) -> None:
    student, teacher = (vit(timm, seed=seed) for seed in range(2))
    tree = {
        "student": under("module.backbone.", bare(student)),
        "teacher": under("backbone.", bare(teacher)),
    }
    path = saved(tree, tmp_path)
    assert_same(stopmim.load_encoder(path), teacher)
    assert_same(stopmim.load_encoder(path, "context"), student)
    del tree["student"]
    with pytest.raises(CheckpointError, match="teacher"):
        stopmim.load_encoder(saved(tree, tmp_path), "context")


def test_heads_are_looked_up_by_width_taken_as_given_and_never_guessed(
    timm: Any, tmp_path: Path
) -> None:
    base = vit(timm, embed_dim=192, num_heads=6)  # of which 3 are the rule
    path = saved({"model": bare(base)}, tmp_path)
    assert_same(stopmim.load_encoder(path, heads=6), base)
    by_width = stopmim.load_encoder(path)
    assert isinstance(by_width, VisionTransformer)
    assert by_width.heads == 3
    odd = vit(timm, embed_dim=48, num_heads=4)
    path = saved(bare(odd), tmp_path)
    assert "heads=" in refused(path)
    assert_same(stopmim.load_encoder(path, heads=4), odd)


def test_an_encoder_without_a_predictor_is_no_model(dino: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no predictor in it") as caught:
        stopmim.load_model(saved(bare(dino), tmp_path))
    assert len(str(caught.value).splitlines()) == 1


# ------------------------------------------------------------------------------ what is refused


def test_a_file_that_lacks_any_one_key_is_refused(timm: Any, tmp_path: Path) -> None:
    state = bare(vit(timm, depth=1, embed_dim=96, num_heads=3))
    stopmim.load_encoder(saved(state, tmp_path))
    for key in state:
        spoiled = {k: v for k, v in state.items() if k != key}
        message = refused(spoiled)
        assert key in message or "positions do not form a square" in message


def test_a_file_with_any_tensor_of_another_shape_is_refused(timm: Any) -> None:
    state = bare(vit(timm, depth=1, embed_dim=96, num_heads=3))
    for key, value in state.items():
        refused(state | {key: torch.cat([value, value[:1]])})


@pytest.mark.parametrize(
    "extra",
    [
        {"fc_norm.weight": torch.ones(384)},
        {"blocks.0.ls1.gamma": torch.ones(384)},  # DINOv2, whose mask_token is left out
        {"reg_token": torch.zeros(1, 4, 384)},
        {"dist_token": torch.zeros(1, 1, 384)},
        {"norm_pre.weight": torch.ones(384)},
        {"blocks.7.norm1.weight": torch.ones(384)},
    ],
    ids=lambda extra: next(iter(extra)),
)
def test_another_architecture_under_the_same_names_is_refused(
    extra: Tree, dino: Any, tmp_path: Path
) -> None:
    assert next(iter(extra)).split(".")[0] in refused(saved(bare(dino) | extra, tmp_path))


def test_a_weight_that_is_no_tensor_or_is_there_twice_is_refused(dino: Any, tmp_path: Path) -> None:
    state = bare(dino)
    assert "norm.bias" in refused(saved(state | {"norm.bias": [1.0]}, tmp_path))
    assert "twice" in refused(saved(state | {"module.norm.bias": state["norm.bias"]}, tmp_path))


@pytest.mark.parametrize(
    "tree",
    [
        {"model": {"conv1.weight": torch.zeros(3)}},
        {"classy_state_dict": {"base_model": {}}},
        {"teacher": {"backbone.conv1.weight": torch.zeros(3)}},
        {"state_dict": {}},
        {"state_dict": 3},
    ],
)
def test_another_network_is_refused(tree: Tree, tmp_path: Path) -> None:
    refused(saved(tree, tmp_path))


@pytest.mark.parametrize("content", [b"", b"text", bytes(40)])
def test_a_damaged_safetensors_file_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    refused(tmp_path / "x.safetensors")


# ------------------------------------------------------------------------------ data2vec


@pytest.fixture(scope="module")
def beit(timm: Any) -> Any:
    from timm.models.beit import Beit

    torch.manual_seed(0)
    return scrambled(
        Beit(
            img_size=48,
            embed_dim=96,
            depth=3,
            num_heads=4,
            num_classes=0,
            global_pool="token",
            use_abs_pos_emb=False,
            use_rel_pos_bias=False,
            use_shared_rel_pos_bias=True,
            init_values=0.5,
        )
    )


def data2vec(model: nn.Module) -> Tree:
    """As the published files are: with what belongs to the pretext task, and the index."""
    state = {key: value for key, value in bare(model).items() if "index" not in key}
    return {
        "model": state
        | {
            "mask_token": torch.zeros(1, 1, 96),
            "lm_head.weight": torch.zeros(96, 96),
            "rel_pos_bias.relative_position_index": torch.zeros(10, 10, dtype=torch.long),
        }
    }


@torch.no_grad()
def test_data2vec_gives_the_features_of_its_own_architecture(beit: Any, tmp_path: Path) -> None:
    encoder = stopmim.load_encoder(saved(data2vec(beit), tmp_path))
    assert isinstance(encoder, RelativeTransformer)
    assert (encoder.pool, encoder.heads, encoder.patch, encoder.training) == ("cls", 4, 16, False)
    images = pictures(48, 48)
    blocks = beit.forward_intermediates(
        images, norm=True, intermediates_only=True, return_prefix_tokens=True, output_fmt="NLC"
    )
    torch.testing.assert_close(encoder(images), blocks[-1][0], atol=1e-5, rtol=1e-5)
    for layers in (1, 3):
        mean = torch.cat([patches.mean(dim=1) for patches, _ in blocks[-layers:]], dim=1)
        first = torch.cat([prefix[:, 0] for _, prefix in blocks[-layers:]], dim=1)
        close = partial(torch.testing.assert_close, atol=1e-5, rtol=1e-5)
        close(encoder.features(images, layers, "mean"), mean)
        close(encoder.features(images, layers, "cls"), first)


@torch.no_grad()
def test_data2vec_sees_the_patches_of_the_index_with_their_own_distances(
    beit: Any, tmp_path: Path
) -> None:
    encoder, images = stopmim.load_encoder(saved(data2vec(beit), tmp_path)), pictures(48, 48)
    order = torch.stack([torch.randperm(9, generator=seeded(i)) for i in range(2)])
    whole = encoder(images)
    torch.testing.assert_close(encoder(images, order), take(whole, order), atol=1e-5, rtol=1e-5)
    few = torch.tensor([[0, 4], [8, 1]])
    changed = images.clone()
    changed[0, :, 32:, 32:] += 3.0
    assert torch.equal(encoder(images, few)[0], encoder(changed, few)[0])


@torch.no_grad()
def test_data2vec_works_on_other_grids_with_the_distances_it_knows(
    beit: Any, tmp_path: Path
) -> None:
    encoder: Any = stopmim.load_encoder(saved(data2vec(beit), tmp_path))
    assert encoder(pictures(64, 96)).shape == (2, 24, 96)
    table = encoder.rel_pos_bias.relative_position_bias_table
    table[:-3] = torch.arange(5.0).repeat_interleave(5)[:, None]  # how far down, whatever across
    bias = encoder.rel_pos_bias(3, 7)[0, 1:, 1:].view(3, 7, 3, 7)
    for a, b in product(range(3), range(3)):
        torch.testing.assert_close(bias[a, :, b], torch.full((7, 7), 2.0 + a - b))


def test_data2vec_is_strict(beit: Any, tmp_path: Path) -> None:
    whole = data2vec(beit)["model"]
    index = "rel_pos_bias.relative_position_index"
    beside = {"mask_token", "lm_head.weight", index, "rel_pos_bias.relative_position_bias_table"}
    for key in whole.keys() - beside:
        if "blocks.1" not in key and "blocks.2" not in key:
            spoiled = {k: v for k, v in whole.items() if k != key}
            assert key in refused({"model": spoiled})
    table = "rel_pos_bias.relative_position_bias_table"
    for other in (whole[table][:-1], whole[table][:0], whole[table][:, :0], whole[table][0]):
        refused({"model": whole | {table: other}})
    assert "pos_embed" in refused(saved(whole | {"pos_embed": torch.zeros(1, 10, 96)}, tmp_path))
    assert "4 heads" in refused(saved(whole, tmp_path), heads=3)


# ------------------------------------------------------------------------------ timm


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("vit_base_patch16_224", {"depth": 2}),  # MAE's B/16
        ("vit_base_patch16_gap_224", {"depth": 2}),  # 16 heads, no class token
        ("vit_tiny_patch16_224", {"num_classes": 5}),
    ],
)
def test_a_timm_model_becomes_an_encoder_with_its_heads(
    name: str, changes: Tree, timm: Any
) -> None:
    model: Any = vit(timm, name, **({"depth": 3} | changes))
    encoder = from_timm(model)
    assert encoder.heads == model.blocks[0].attn.num_heads
    images = pictures()
    with torch.no_grad():
        tokens = model.forward_features(images)[:, model.num_prefix_tokens :]
        assert_close(encoder(images), tokens)


def test_the_epsilon_of_norms_comes_with_a_timm_model(timm: Any) -> None:
    model = vit(timm, norm_layer=partial(nn.LayerNorm, eps=1e-2))
    assert_same(from_timm(model), model)


@pytest.mark.parametrize(
    "changes",
    [{"act_layer": nn.ReLU}, {"init_values": 0.1}, {"qk_norm": True}, {"reg_tokens": 2}],
    ids=str,
)
def test_a_timm_model_that_is_no_plain_vit_is_refused(changes: Tree, timm: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        from_timm(vit(timm, **changes), "timm:odd")
    assert len(str(caught.value).splitlines()) == 1
    with pytest.raises(CheckpointError, match="not a plain ViT"):
        from_timm(nn.Linear(2, 2), "timm:odd")


def test_an_unknown_timm_name_is_one_line(timm: Any) -> None:
    assert "nobody" in refused("timm:vit_nobody_knows")


def test_without_timm_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UserError, match=r"stopmim\[timm\]") as caught:
        stopmim.load_encoder("timm:vit_base_patch16_224.mae")
    assert len(str(caught.value).splitlines()) == 1


# ------------------------------------------------------------------------------ Hugging Face


def to_hub(state: Tree, width: int, prefix: str = "") -> Tree:
    """Weights under the names the files on the hub have."""
    names = {
        "cls_token": "embeddings.cls_token",
        "pos_embed": "embeddings.position_embeddings",
        "patch_embed.proj": "embeddings.patch_embeddings.projection",
        "norm": "layernorm",
        "norm1": "layernorm_before",
        "attn.proj": "attention.output.dense",
        "norm2": "layernorm_after",
        "mlp.fc1": "intermediate.dense",
        "mlp.fc2": "output.dense",
    }
    found = {}
    for key, value in state.items():
        parts, kind = key.split("."), key.rsplit(".", 1)[-1]
        layer = f"encoder.layer.{parts[1]}." if parts[0] == "blocks" else ""
        stem = key.removeprefix(f"blocks.{parts[1]}." if layer else "").removesuffix(f".{kind}")
        if stem == "attn.qkv":
            for i, part in enumerate(("query", "key", "value")):
                name = f"{layer}attention.attention.{part}.{kind}"
                found[prefix + name] = value[i * width : (i + 1) * width].clone()
        else:
            suffix = "" if key in names else f".{kind}"
            found[prefix + layer + names[key if key in names else stem] + suffix] = value.clone()
    return found


def hub_folder(folder: Path, tree: Tree, **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tree, folder / "model.safetensors")
    known = {"model_type": "vit", "num_attention_heads": 6, "hidden_act": "gelu"}
    (folder / "config.json").write_text(json.dumps(known | config))
    return folder


@pytest.mark.parametrize("kind", ["vit", "vit_mae", "ijepa"])
def test_a_folder_of_the_hub_gives_the_same_features_with_its_epsilon(
    kind: str, timm: Any, tmp_path: Path
) -> None:
    class_free: Tree = {"class_token": False, "global_pool": "avg", "fc_norm": False}
    options: Tree = class_free if kind == "ijepa" else {}
    model = fixed_positions(vit(timm, norm_layer=partial(nn.LayerNorm, eps=1e-3), **options))
    prefix = {"vit": "", "vit_mae": "vit.", "ijepa": "ijepa."}[kind]
    tree = to_hub(bare(model), 384, prefix)
    tree |= {"vit": {"pooler.dense.weight": torch.zeros(2)}, "ijepa": {}}.get(
        kind, {"decoder.decoder_norm.weight": torch.zeros(2)}
    )
    folder = hub_folder(tmp_path / "hub", tree, model_type=kind, layer_norm_eps=1e-3)
    assert_same(stopmim.load_encoder(folder), model)
    other = stopmim.load_encoder(hub_folder(tmp_path / "hub", tree, model_type=kind))
    assert isinstance(other, VisionTransformer)
    assert {m.eps for m in other.modules() if isinstance(m, nn.LayerNorm)} == {1e-12}


def test_a_folder_of_the_hub_is_strict(timm: Any, tmp_path: Path) -> None:
    tree = to_hub(bare(vit(timm, depth=1)), 384)
    folder = hub_folder(tmp_path / "hub", tree)
    stopmim.load_encoder(folder)
    for key in tree:
        refused(hub_folder(folder, {k: v for k, v in tree.items() if k != key}))
    assert "layerscale" in refused(hub_folder(folder, tree | {"layerscale": torch.zeros(3)}))
    assert "swin" in refused(hub_folder(folder, tree, model_type="swin"))
    assert "relu" in refused(hub_folder(folder, tree, hidden_act="relu"))
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        stopmim.load_encoder(folder)
    hub_folder(folder, tree)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: no such file"):
        stopmim.load_encoder(folder)
