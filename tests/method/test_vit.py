"""The encoder: the recorded one, what masking hides, other image sizes, and its weights."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from helpers import golden, golden_about, seeded, under
from stopmim.config.architectures import SIZES, parse_arch
from stopmim.gpu import blocks
from stopmim.gpu.attention import is_short
from stopmim.gpu.blocks import take
from stopmim.method.encoder import Block, PatchEmbed, VisionTransformer, initialise
from stopmim.method.model import Features
from stopmim.method.positions import sincos_2d


def recorded_encoder() -> tuple[VisionTransformer, dict[str, Tensor]]:
    recorded, c = golden("encoder"), golden_about("encoder")["config"]
    encoder = VisionTransformer(
        c["img_size"], c["patch_size"], c["embed_dim"], c["depth"], c["num_heads"], c["mlp_ratio"]
    ).eval()
    encoder.load_state_dict(under(recorded, "state."))
    return encoder, recorded


def small(image_size: int = 32) -> VisionTransformer:
    torch.manual_seed(0)
    return VisionTransformer(image_size, 8, 24, 2, 3).eval()


def pictures(height: int = 32, width: int = 32) -> Tensor:
    return torch.randn(2, 3, height, width, generator=seeded())


# ------------------------------------------------------------------------------ the recording


@torch.no_grad()
def test_the_recorded_weights_give_the_recorded_features() -> None:
    encoder, recorded = recorded_encoder()
    images = recorded["images"]
    torch.testing.assert_close(encoder(images), recorded["out_full"], atol=2e-5, rtol=0)
    patches = encoder.patch_embed(images)
    torch.testing.assert_close(patches, recorded["patch_tokens"], atol=2e-5, rtol=0)


@torch.no_grad()
def test_the_recorded_masks_give_the_recorded_features() -> None:
    encoder, recorded = recorded_encoder()
    images, index = recorded["images"], recorded["mask_index"]
    torch.testing.assert_close(encoder(images, index), recorded["out_masked"], atol=2e-5, rtol=0)
    both = torch.cat([encoder(images, recorded[name]) for name in ("mask_index", "mask_index_b")])
    torch.testing.assert_close(both, recorded["out_two_masks"], atol=2e-5, rtol=0)


@pytest.mark.parametrize("layers", [1, 2, 3])
@torch.no_grad()
def test_features_are_the_last_blocks_normed_pooled_and_joined_in_block_order(layers: int) -> None:
    encoder, recorded = recorded_encoder()
    blocks = [recorded[f"norm_block{i}"].mean(dim=1) for i in range(3)]
    want = torch.cat(blocks[3 - layers :], dim=1)
    features = encoder.features(recorded["images"], layers=layers)
    torch.testing.assert_close(features, want, atol=2e-5, rtol=0)


def test_the_state_dict_has_the_published_keys_and_shapes() -> None:
    encoder, recorded = recorded_encoder()
    ours = {key: value.shape for key, value in encoder.state_dict().items()}
    assert ours == {key: value.shape for key, value in under(recorded, "state.").items()}


def test_the_position_table_is_in_the_state_dict_and_never_trained() -> None:
    encoder = small()
    assert torch.equal(encoder.pos_embed[0], sincos_2d(4, 24))
    assert "pos_embed" in encoder.state_dict()
    assert "pos_embed" not in dict(encoder.named_parameters())


# ------------------------------------------------------------------------------ what is hidden


@pytest.mark.parametrize("filler", [math.nan, 1e4])
@torch.no_grad()
def test_hidden_patches_cannot_influence_the_features(filler: float) -> None:
    encoder, images = small(), pictures()
    index = torch.tensor([[1, 2, 6, 15], [0, 5, 9, 10]])
    seen = encoder(images, index)
    grid = images.unfold(2, 8, 8).unfold(3, 8, 8)  # (B, 3, 4, 4, 8, 8)
    hidden = torch.ones(2, 16, dtype=torch.bool).scatter(1, index, False).view(2, 1, 4, 4, 1, 1)
    spoiled = grid.masked_fill(hidden, filler).permute(0, 1, 2, 4, 3, 5).reshape(images.shape)
    assert not torch.equal(spoiled, images)
    assert torch.equal(encoder(spoiled, index), seen)


@torch.no_grad()
def test_visible_patches_influence_each_other() -> None:
    encoder, images = small(), pictures()
    index = torch.tensor([[1, 2, 6, 15], [0, 5, 9, 10]])
    other = images.clone()
    other[0, :, :8, 8:16] += 1  # patch 1 of the first image
    change = (encoder(other, index) - encoder(images, index)).abs().amax(dim=2)
    assert (change[0] > 0).all()
    assert (change[1] == 0).all()


@torch.no_grad()
def test_the_order_of_the_index_is_the_order_of_the_features() -> None:
    encoder, images = small(), pictures()
    order = torch.randperm(16, generator=seeded(1)).expand(2, -1)
    torch.testing.assert_close(encoder(images, order), take(encoder(images), order))


@torch.no_grad()
@pytest.mark.parametrize("class_token", [False, True])
def test_patches_that_are_asked_for_are_those_of_the_whole_image(class_token: bool) -> None:
    """Some twice, in any order, and all of them see the patches that nobody asked for."""
    torch.manual_seed(0)
    encoder = VisionTransformer(32, 8, 24, 2, 3, class_token=class_token)
    images, index = torch.randn(2, 3, 32, 32), torch.tensor([[3, 3, 15, 0], [7, 1, 2, 7]])
    found = encoder(images, asked=index)
    torch.testing.assert_close(found, take(encoder(images), index))
    images[0, :, :8, 8:16] += 1  # patch 1 of the first image
    changed = encoder(images, asked=index)
    assert not torch.isclose(changed[0], found[0], rtol=1e-6).all()
    torch.testing.assert_close(changed[1], found[1])


@pytest.mark.parametrize(("layers", "seen"), [(1, 16), (1, 17), (2, 3), (1, 3)])
def test_targets_are_the_same_however_many_are_asked_for(layers: int, seen: int) -> None:
    torch.manual_seed(0)
    teacher, images = VisionTransformer(32, 8, 24, 2, 3), torch.randn(2, 3, 32, 32)
    index = torch.randint(16, (3, 2, seen))
    target = Features(layers=layers)
    every = target.of(teacher, images, torch.arange(16).expand(1, 2, 16))[0]
    wanted = torch.stack([take(every, block) for block in index])
    torch.testing.assert_close(target.of(teacher, images, index), wanted)


def test_the_first_patch_is_a_patch_like_any_other() -> None:
    encoder, images = small(), pictures()
    tokens = encoder(images)
    assert tokens.shape == (2, 16, 24)
    torch.testing.assert_close(encoder.features(images), tokens.mean(dim=1))
    # A block of the image and its place: patch 0 must see its own pixels and its own position.
    only = take(encoder.embed(images), torch.zeros(2, 1, dtype=torch.long))[:, 0]
    weight, bias = encoder.patch_embed.proj.weight, encoder.patch_embed.proj.bias
    assert bias is not None
    want = images[:, :, :8, :8].flatten(1) @ weight.flatten(1).T + bias + sincos_2d(4, 24)[0]
    torch.testing.assert_close(only, want)


# ------------------------------------------------------------------------------ other sizes


def ramps(side: int) -> Tensor:
    """A table whose first channel is the row and whose second channel is the column."""
    line = torch.arange(side, dtype=torch.float32)
    row, col = torch.meshgrid(line, line, indexing="ij")
    table = torch.zeros(side * side, 24)
    table[:, 0], table[:, 1] = row.flatten(), col.flatten()
    return table[None]


@pytest.mark.parametrize(("rows", "cols"), [(28, 28), (42, 28), (14, 28), (28, 14), (21, 7)])
def test_a_resized_table_keeps_rows_rows_and_columns_columns(rows: int, cols: int) -> None:
    encoder = VisionTransformer(14 * 8, 8, 24, 1, 3)
    encoder.pos_embed = ramps(14)
    table = encoder.positions(rows, cols).view(rows, cols, 24)
    # The centre of patch i of n lies at (i + 1/2) 14/n - 1/2 on the grid of the table.
    want = [(torch.arange(n) + 0.5) * 14 / n - 0.5 for n in (rows, cols)]
    inner = [(line > 1.5) & (line < 11.5) for line in want]  # a cubic reaches two patches far
    assert all(part.sum() >= 4 for part in inner)
    got_rows, got_cols = table[inner[0]][:, inner[1]][..., :2].unbind(-1)
    # torch's cubic (a = -0.75) bends a straight line by at most 0.047 of a patch.
    torch.testing.assert_close(
        got_rows, want[0][inner[0], None].expand_as(got_rows), atol=0.05, rtol=0
    )
    torch.testing.assert_close(
        got_cols, want[1][None, inner[1]].expand_as(got_cols), atol=0.05, rtol=0
    )


def test_at_its_own_size_the_table_is_untouched() -> None:
    encoder = VisionTransformer(14 * 8, 8, 24, 1, 3)
    assert encoder.positions(14, 14) is encoder.pos_embed


def test_resizing_treats_the_corners_alike() -> None:
    # Cutting off the first entry as a class token would shift everything by one patch.
    encoder = small()
    spots = []
    for patch in (0, 3, 12, 15):
        encoder.pos_embed = torch.zeros(1, 16, 24)
        encoder.pos_embed[0, patch] = 1.0
        spots.append(encoder.positions(8, 8)[0, :, 0].view(8, 8))
    torch.testing.assert_close(spots[1], spots[0].flip(1))
    torch.testing.assert_close(spots[2], spots[0].flip(0))
    torch.testing.assert_close(spots[3], spots[0].flip(0, 1))
    assert spots[0].argmax() == 0
    assert spots[0][5:].abs().max() == 0


@torch.no_grad()
def test_larger_and_oblong_images_give_features_at_the_right_places() -> None:
    encoder = small()
    wide = pictures(32, 64)
    tokens = encoder(wide)
    assert tokens.shape == (2, 4 * 8, 24)
    brighter = wide.clone()
    brighter[:, :, 8:16, 40:48] += 1  # row 1, column 5
    moved = (encoder.embed(brighter) - encoder.embed(wide)).abs().amax(dim=(0, 2))
    assert moved.nonzero().flatten().tolist() == [1 * 8 + 5]
    assert encoder.features(pictures(64, 64), layers=2).shape == (2, 48)


def test_images_that_do_not_divide_into_patches_are_refused() -> None:
    with pytest.raises(ValueError, match="36x32 do not divide into patches 8"):
        small()(pictures(36, 32))


def test_what_cannot_be_built_or_pooled_is_refused() -> None:
    with pytest.raises(ValueError, match="patch 7 does not divide the image size 32"):
        VisionTransformer(32, 7, 24, 1, 3)
    with pytest.raises(ValueError, match="width 24 is not divisible by 5 heads"):
        VisionTransformer(32, 8, 24, 1, 5)
    with pytest.raises(ValueError, match="no class token"):
        small().features(pictures(), pool="cls")
    for layers in (0, 3):
        with pytest.raises(ValueError, match=f"between 1 and 2, got {layers}"):
            small().features(pictures(), layers=layers)


# ------------------------------------------------------------------------------ the weights


def test_every_parameter_is_initialised() -> None:
    encoder = VisionTransformer(64, 8, 96, 4, 3)
    with torch.no_grad():
        for weight in encoder.parameters():
            weight.fill_(math.nan)
    torch.manual_seed(0)
    encoder.apply(initialise)
    for name, weight in encoder.named_parameters():
        parameter = weight.detach()
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif parameter.ndim == 1:
            assert (parameter == 1).all(), name
        else:  # no layer is rescaled by its depth, attn.proj and mlp.fc2 neither
            assert float(parameter.std()) == pytest.approx(0.02, rel=0.04), name
            assert float(parameter.mean()) == pytest.approx(0, abs=5 * 0.02 / 96), name


def test_the_constructor_initialises() -> None:
    torch.manual_seed(3)
    built = VisionTransformer(32, 8, 24, 2, 3)
    stds = {name: float(p.detach().std()) for name, p in built.named_parameters() if p.ndim > 1}
    assert all(std == pytest.approx(0.02, rel=0.15) for std in stds.values()), stds
    assert all((p == 0).all() for name, p in built.named_parameters() if name.endswith("bias"))


@pytest.mark.parametrize(
    ("arch", "timm"),
    [  # timm's vit_*_patch*_224 with num_classes=0: these have a class token and learned positions
        ("vit_ti16", 5_524_416),
        ("vit_s16", 21_665_664),
        ("vit_b16", 85_798_656),
        ("vit_l16", 303_301_632),
        ("vit_h14", 630_764_800),
        ("vit_g14", 1_011_202_432),
    ],
)
def test_every_size_has_the_parameters_of_the_usual_one_less_class_token_and_positions(
    arch: str, timm: int
) -> None:
    with torch.device("meta"):
        encoder = VisionTransformer.from_arch(arch, 224)
    size, patch = parse_arch(arch)
    d, hidden = size.width, round(size.width * size.mlp_ratio)
    block = (3 * d * d + 3 * d) + (d * d + d) + (2 * d * hidden + hidden + d) + 4 * d
    by_hand = (3 * patch * patch * d + d) + size.depth * block + 2 * d
    extra = d * (1 + (224 // patch) ** 2 + 1)  # class token, its position, those of the patches
    assert by_hand == timm - extra
    assert sum(p.numel() for p in encoder.parameters()) == by_hand
    assert encoder.pos_embed.shape == (1, (224 // patch) ** 2, d)


def test_every_norm_has_the_published_epsilon() -> None:
    # With a spread as small as the epsilon's root, 1e-6 and torch's 1e-5 are far apart.
    tokens = 1e-3 * torch.randn(1, 5, 24, generator=seeded())
    normed = tokens - tokens.mean(dim=-1, keepdim=True)
    normed = normed / (tokens.var(dim=-1, correction=0, keepdim=True) + 1e-6).sqrt()
    norms = [module for module in small().modules() if isinstance(module, nn.LayerNorm)]
    assert len(norms) == 2 * 2 + 1
    for norm in norms:
        torch.testing.assert_close(norm(tokens), normed)


def test_the_heads_of_every_size_divide_its_width() -> None:
    heads = {name: size.heads for name, size in SIZES.items() if name != "micro"}
    assert heads == {"ti": 3, "s": 6, "b": 12, "l": 16, "h": 16, "g": 16}
    assert all(size.width % size.heads == 0 for size in SIZES.values())


def test_every_parameter_takes_part() -> None:
    encoder = small()
    encoder(pictures()).square().mean().backward()
    without = [n for n, p in encoder.named_parameters() if p.grad is None]
    assert without == []


def test_patches_are_embedded_as_the_convolution_does() -> None:
    embed = PatchEmbed(4, 24)
    images = torch.randn(2, 3, 12, 8)
    expected = embed.proj(images).flatten(2).transpose(1, 2)
    torch.testing.assert_close(embed(images), expected)
    index = torch.tensor([[5, 0], [2, 4]])
    torch.testing.assert_close(embed(images, index), take(expected, index))


def test_a_block_that_leaves_out_its_first_tokens_still_looks_at_them() -> None:
    block, x = Block(16, 2), torch.randn(3, 7, 16)
    torch.testing.assert_close(block(x, first=4), block(x)[:, 4:])
    changed = x.clone()
    changed[:, 0] = torch.randn(3, 16)
    assert not torch.allclose(block(changed, first=4), block(x, first=4))


@pytest.mark.parametrize(
    ("tokens", "channels", "fits"),
    [
        (128, 64, True),
        (72, 88, True),  # ViT-g
        (85, 128, True),  # the predictor of ViT-Ti
        (129, 24, False),
        (64, 192, True),
        (65, 192, False),  # predictors of 384 channels with 2 heads: 256 KB of shared memory
        (40, 384, False),  # with 1
        (20, 384, True),
    ],
)
def test_our_kernel_is_asked_only_for_tiles_that_a_gpu_can_hold(
    tokens: int, channels: int, fits: bool
) -> None:
    assert is_short(tokens, channels, torch.device("cpu")) == fits


@pytest.mark.parametrize(
    ("tokens", "channels", "kibibytes"),
    [
        (55, 64, 64),  # contexts of B and L
        (85, 32, 64),  # their predictors
        (116, 24, 64),  # of H
        (128, 64, 80),
        (73, 80, 160),  # the context of ViT-H/14
        (128, 128, 160),
    ],
)
def test_a_tile_needs_the_shared_memory_that_it_was_compiled_to(
    tokens: int, channels: int, kibibytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = torch.device("cuda", 0)
    for has in (64, 99, 163, 227):  # a T4, an RTX 4090, an A100, an H100
        properties = SimpleNamespace(shared_memory_per_block_optin=has * 1024)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, p=properties: p)
        assert is_short(tokens, channels, gpu) == (has >= kibibytes)
    assert is_short(tokens, channels, torch.device("cpu"))


def test_fused_kernels_without_a_gpu_are_the_usual_ones() -> None:
    torch.manual_seed(0)
    encoder, images = VisionTransformer(16, 4, 24, 2, 2), torch.randn(2, 3, 16, 16)
    usual = encoder(images)
    encoder.way = blocks.Way(fused=True)
    assert torch.equal(encoder(images), usual)
    with torch.autocast("cpu", torch.bfloat16):  # which on a GPU is enough
        assert encoder(images).dtype == torch.float32


@pytest.mark.parametrize(
    ("device", "amp", "recompute", "sharded", "needed"),
    [
        ("cpu", None, False, False, "a GPU"),
        ("cuda", None, False, False, "bf16 or fp16"),
        ("cuda", torch.bfloat16, True, False, "runtime.recompute: off"),
        ("cuda", torch.bfloat16, False, True, "runtime.parallel: ddp"),
        ("cuda", torch.bfloat16, False, False, None),
    ],
)
def test_fused_kernels_that_cannot_be_used_are_reported_once(
    device: str,
    amp: torch.dtype | None,
    recompute: bool,
    sharded: bool,
    needed: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(blocks, "HAVE_TRITON", True)
    blocks.warn_unless_fused.cache_clear()
    for _ in range(2):
        blocks.warn_unless_fused(torch.device(device), amp, 384, recompute, sharded)
    told = capsys.readouterr().err
    assert told.count("continuing with the usual kernels") == (needed is not None)
    assert needed is None or f"runtime.kernels: fused needs {needed};" in told


def test_recomputing_activations_changes_no_gradient() -> None:
    torch.manual_seed(0)
    encoder, images = VisionTransformer(16, 4, 24, 2, 2), torch.randn(2, 3, 16, 16)
    gradients = []
    for recompute in (False, True):
        encoder.way = blocks.Way(recompute=recompute)
        encoder.zero_grad()
        encoder(images).square().sum().backward()
        gradients.append([p.grad for p in encoder.parameters()])
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_a_residual_stream_in_half_precision_differs_by_rounding() -> None:
    torch.manual_seed(0)
    encoder, images = VisionTransformer(16, 4, 24, 4, 2), torch.randn(2, 3, 16, 16)
    exact = encoder(images)
    streams = list[torch.dtype]()
    encoder.blocks[1].register_forward_hook(lambda _, inputs, x: streams.append(x.dtype))
    encoder.way = blocks.Way(half=True)
    assert torch.equal(encoder(images), exact)  # without autocast everything is float32
    with torch.autocast("cpu", torch.bfloat16):
        rounded = encoder(images)
        encoder.way = blocks.Way()
        usual = encoder(images)
    assert streams == [torch.float32, torch.bfloat16, torch.float32]
    assert rounded.dtype == usual.dtype == torch.float32
    errors = [float((x - exact).detach().square().mean().sqrt()) for x in (usual, rounded)]
    assert 0 < errors[0] < errors[1] < 0.02  # bfloat16 has eight bits
