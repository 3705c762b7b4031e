"""The account of a step: its operations are torch's, its bytes those of a count by hand."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from stopmim.base.errors import UserError
from stopmim.bench.accounting import KINDS, Account, Tokens, Work, account, lines
from stopmim.bench.step import bench_account, tokens_of
from stopmim.config.architectures import SIZES, Size
from stopmim.method.build import build, configure, draw_masks
from stopmim.method.loss import masked_loss
from stopmim.method.model import Batch

PARTS = ("target encoder", "context encoder", "predictor")


def flops(found: Account, part: str) -> float:
    return sum(works[part].flops for works in found.values() if part in works)


@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        ("tiny_cpu", {}),
        ("tiny_cpu", {"positions.kind": "sincos"}),
        ("tiny_cpu", {"positions.covariance": "untied", "positions.tokens": "both"}),
        ("tiny_cpu", {"positions.covariance": "fixed"}),
        ("tiny_cpu_mae", {}),
        ("small_images", {}),
        ("vit_b16_stop", {}),
    ],
)
def test_operations_of_every_part_are_those_that_torch_counts(
    preset: str, changes: dict[str, object]
) -> None:
    config = configure(preset, changes | {"optim.batch_size": 1})
    (masks,) = draw_masks(config, 0, [slice(0, 1)], torch.device("cpu"))
    found = account(config, tokens_of(masks), 2)
    with torch.device("meta"), sdpa_kernel(SDPBackend.MATH):
        model = build(config).train()
        context, targets = (torch.empty_like(x, device="meta") for x in masks)
        images = torch.empty(1, 3, config.image_size, config.image_size)
        noise = model.predictor.draw(context, targets)
        with FlopCounterMode(display=False, depth=2) as counter:
            batch = Batch(images, context, targets)
            masked_loss(model, model.target, batch, noise).loss.backward()
    for part, name in zip(PARTS, ("target_encoder", "encoder", "predictor"), strict=True):
        counts = counter.get_flop_counts().get(f"MaskedImageModel.{name}", {})
        assert flops(found, part) == sum(counts.values()), part
    assert sum(flops(found, part) for part in PARTS) == counter.get_total_flops()


def test_bytes_of_one_block_each_are_those_of_a_count_by_hand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """64 patches of 108 pixels, 5 of them seen, two targets of 3; all widths 12, MLPs of 48."""
    monkeypatch.setitem(SIZES, "micro", Size(12, 1, 3, predictor_depth=1))
    changes = {"optim.batch_size": 1, "predictor.width": 12, "predictor.depth": None}
    found = account(configure("tiny_cpu", changes), Tokens(5, 2, 3), 2)

    def moved(kind: str) -> list[float]:
        return [found[kind][part].bytes for part in PARTS]

    # Every linear layer has inputs x outputs weights and as many biases as outputs.
    block = 12 * 36 + 36 + 12 * 12 + 12 + 12 * 48 + 48 + 48 * 12 + 12 + 2 * 24
    encoder = 108 * 12 + 12 + block + 24
    predictor = 2 * (12 * 12 + 12) + block + 24 + 12  # A, the output, a norm, m~

    # Forward q, k, v and out; backward these again (the gradient of out), and one of qkv.
    last = 3 + 8 + 8 + 3  # masked tokens alone are queries
    context = 5 * (3 + 1) + 5 * (3 + 1 + 3)
    both = 2 * (last + last + 3 * 8)
    assert moved("attention") == [2 * 12 * n for n in (64 * 4, context, both)]
    # Forward in and out, backward in and two gradients.
    assert moved("GELU") == [2 * 48 * n for n in (6 * 2, 5 * 5, 2 * 3 * 5)]
    # AdamW: four read and three written; the norm one, decay two; EMA three.
    assert moved("optimizer and EMA") == [
        4 * n for n in (3 * encoder, 10 * encoder, 10 * predictor)
    ]

    # A norm forward: stream and branch in, stream and norm out. Backward: stream, its gradient and
    # that of the norm in; the first of these out, in both precisions; two in again to be summed.
    forward, backward = 4 + 2 + 4 + 2, 4 + 4 + 2 + 4 + 2 + (4 + 2)
    cut = 108 * (4 + 2)  # of every patch
    biases = 36 + 12 + 48 + 12 + 12  # of a token, with the patch embedding
    # After the attention of its one block, the target encoder goes on with the targets alone: they
    # are gathered from the stream and from what attention adds.
    gathered = 6 * 12 * 2 * (4 + 2)
    teacher = (64 + 6 + 6) * 12 * forward + 64 * cut + gathered + encoder * (4 + 2)
    student = 3 * 5 * 12 * (forward + backward) + 5 * cut + 2 * 5 * biases + encoder * 2 * (4 + 2)
    read = 2 * (8 + 3 + 3) * 12 * (forward + backward) + predictor * 2 * (4 + 2)
    read += 2 * (2 * 8 * 36 + 6 * (12 + 48 + 12) + 12 * (5 + 6 + 6))  # gradients of biases
    read += 6 * 12 * (3 * (4 + 2) + 2)  # the loss
    assert moved("norms, residuals, sums") == [teacher, student, read]

    # A product reads two of input, output and weight, and writes the third.
    layers = (12 + 36) + (12 + 12) + 2 * (12 + 48)
    teacher = 64 * (12 + 36 + 108 + 12) + 6 * (layers - 12 - 36) + encoder
    student = 3 * 5 * layers + 2 * 5 * (108 + 12) + 3 * encoder
    read = 3 * (16 * (12 + 36) + 6 * (12 + 12) + 2 * 6 * (12 + 48)) + 3 * predictor
    read += (3 * 5 + 2 * 6 + 3 * 6) * (12 + 12)
    assert moved("matrix products") == [2 * n for n in (teacher, student, read)]


def test_a_residual_stream_in_half_precision_moves_half_of_its_bytes() -> None:
    """Twice forward (read, written) and four times backward, at the norms of tokens of 96."""
    tokens, depth = Tokens(5, 2, 3), SIZES["micro"].depth
    configs = [configure("tiny_cpu", {"runtime.residual": stream}) for stream in ("fp32", "half")]
    kept = [account(config, tokens, 2)["norms, residuals, sums"] for config in configs]
    saved = [kept[0][part].bytes - kept[1][part].bytes for part in PARTS]
    batch, width = configure("tiny_cpu").optim.batch_size, SIZES["micro"].width
    assert saved[1] == batch * 2 * (2 + 4) * (2 * depth + 1) * 5 * width
    normed = (2 * depth - 1) * 64 + 2 * 6  # the last two are of targets
    assert saved[0] == batch * 2 * 2 * normed * width


def test_parts_of_a_batch_read_the_weights_again_and_update_them_once() -> None:
    changes = {"optim.batch_size": 8}
    one, four = (
        account(configure("tiny_cpu", changes | {"runtime.accumulate": n}), Tokens(24, 4, 4), 2)
        for n in (1, 4)
    )
    for kind in KINDS:
        for part in PARTS:
            more = four[kind][part].bytes > one[kind][part].bytes
            assert more == (kind in ("matrix products", "norms, residuals, sums")), (kind, part)
            assert four[kind][part].flops == one[kind][part].flops


def test_a_floor_is_the_longer_of_both_for_every_part() -> None:
    """One part waits for operations and the other for memory: neither can use the other's time."""
    found = {"attention": {"a": Work(4e9, 1e9), "b": Work(1e9, 6e9)}}
    (line,) = lines(found, (2e12, 1e12), {"attention": 11.5, "GELU": 3.0})
    assert line["floor_ms"] == 2.0 + 6.0
    assert line["measured_ms"] == 11.5
    assert line["gigabytes"] == {"a": 1.0, "b": 6.0}


def test_an_account_needs_no_gpu_and_is_of_a_batch_for_one() -> None:
    about, *kinds = bench_account("vit_h14_stop", {}, masks="published")
    assert (about["batch_size"], about["context"], about["target"]) == (64, 73, 43)
    assert [line["kind"] for line in kinds] == list(KINDS)
    per_image = [sum(line["gflop"][part] for line in kinds) / 64 for part in PARTS]
    assert per_image == pytest.approx([330.8, 278, 60.7], rel=0.002)


def test_an_account_of_half_resolution_is_refused() -> None:
    config = configure("vit_b16_ijepa", {"lowres": "max"})
    with pytest.raises(UserError, match="lowres max is not supported"):
        account(config, Tokens(24, 4, 4), 2)
