"""Operations and bytes of one update, by kind of work and by part of the network.

Both follow from shapes; nothing is run. Divided by the rates of a device they give a floor, the
time that no kernel can beat. Bytes are counted for the present division into kernels, each of which
reads its inputs once and writes its outputs once. Fusing further would move fewer.

Shapes: N tokens enter a block, Q of them leave it, D width, H hidden width of the MLP. `a` is the
size of an activation in bytes, 2 under autocast; weights, gradients and moments are float32, and so
is the residual stream unless `runtime.residual` is half.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import nn

from stopmim.base.errors import UserError
from stopmim.bench.timing import Line
from stopmim.config.schema import Config
from stopmim.method.build import build
from stopmim.method.encoder import Block, VisionTransformer
from stopmim.method.model import MaskedImageModel
from stopmim.method.positions import StochasticPositions

PRODUCTS, ATTENTION, NORMS = "matrix products", "attention", "norms, residuals, sums"
GELU, OPTIMIZER = "GELU", "optimizer and EMA"
KINDS = (PRODUCTS, ATTENTION, NORMS, GELU, OPTIMIZER)
FULL = 4  # bytes of a float32


class Tokens(NamedTuple):
    """Number of patches that the masks of one image have."""

    context: int
    targets: int  # blocks, each predicted by itself
    target: int  # patches of one block


@dataclass(frozen=True)
class Work:
    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    def times(self, n: float) -> "Work":
        return Work(n * self.flops, n * self.bytes)

    def seconds(self, flops_per_s: float, bytes_per_s: float) -> float:
        """The floor: operations and bytes at these rates, whichever takes longer."""
        return max(self.flops / flops_per_s, self.bytes / bytes_per_s)


Account = dict[str, dict[str, Work]]  # kind of work -> part of the network -> work


def account(config: Config, tokens: Tokens, a: int) -> Account:
    """The work of one update. Activations that are recomputed in backward count once."""
    if config.lowres:
        raise UserError(f"bench: lowres {config.lowres} is not supported; leave it out")
    with torch.device("meta"):  # shapes only: a ViT-H takes no memory
        model = build(config)
    batch, parts = config.optim.batch_size, config.runtime.accumulate
    stream = a if config.runtime.residual == "half" else FULL
    found: Account = {kind: {} for kind in KINDS}
    for tower in _towers(model, tokens, a):
        # Weights are read, and their gradients written, once for every part of a batch.
        products = _products(tower, a).times(batch) + _weights(tower, a).times(parts)
        norms = _norms(tower, a, stream).times(batch) + _casts(tower, a).times(parts)
        found[PRODUCTS][tower.part] = products
        found[ATTENTION][tower.part] = _attention(tower, a).times(batch)
        found[NORMS][tower.part] = norms
        found[GELU][tower.part] = _gelu(tower, a).times(batch)
        found[OPTIMIZER][tower.part] = _optimizer(tower)
    return found


def operations(found: Account) -> float:
    """Operations of all parts together."""
    return sum(work.flops for parts in found.values() for work in parts.values())


def lines(
    found: Account,
    rates: tuple[float, float] | None = None,
    measured: dict[str, float] | None = None,
) -> list[Line]:
    """A line per kind of work, with the floor at `rates` (operations and bytes per second) and the
    milliseconds `measured`, if these are given."""
    rows = []
    for kind, parts in found.items():
        line: Line = {"bench": "step account", "kind": kind}
        line["gflop"] = {part: round(work.flops / 1e9, 2) for part, work in parts.items()}
        line["gigabytes"] = {part: round(work.bytes / 1e9, 3) for part, work in parts.items()}
        if rates:
            floor = sum(work.seconds(*rates) for work in parts.values())
            line["floor_ms"] = round(1e3 * floor, 3)
        if measured and kind in measured:
            line["measured_ms"] = measured[kind]
        rows.append(line)
    return rows


# ------------------------------------------------------------------------------ the shapes


class Layer(NamedTuple):
    """A linear layer and the number of tokens of one image that it sees."""

    tokens: int
    inputs: int
    outputs: int
    of_data: bool = False  # pixels or noise, which need no gradient


class Tower(NamedTuple):
    """A stack of transformer blocks with the layers before and after it."""

    part: str
    blocks: list[tuple[int, int]]  # N and Q of each
    sequences: int  # of one image: the predictor sees the context once per target block
    width: int
    hidden: int
    ends: list[Layer]  # outside of the blocks
    other: float  # bytes of one image that move before and after the blocks
    parameters: int
    trained: bool


def _towers(model: MaskedImageModel, tokens: Tokens, a: int) -> Iterator[Tower]:
    encoder, predictor, (seen, blocks, k) = model.encoder, model.predictor, tokens
    prefix = encoder.prefix
    if model.target_encoder is not None:
        asked, every = blocks * k, encoder.side**2
        few = getattr(model.target, "layers", 1) == 1 and asked < every
        # Targets are gathered, read and written: within the last block, or after the encoder.
        taken = 2 * (FULL + a if few else FULL) * asked * encoder.width
        tower = _encoder("target encoder", model.target_encoder, every, prefix, a, taken)
        yield tower._replace(blocks=[*tower.blocks[:-1], (every + prefix, asked)]) if few else tower
    yield _encoder("context encoder", encoder, seen, prefix, a, 0.0)
    known = seen + (prefix if model.target.class_token_seen else 0)
    positions, noisy = predictor.positions, 0
    if isinstance(positions, StochasticPositions) and positions.covariance != "fixed":
        noisy = blocks * k * predictor.noisy_masked + seen * predictor.noisy_context
    proj, stack = predictor.predictor_proj, predictor.predictor_blocks
    ends = [
        Layer(known, encoder.width, positions.width),
        Layer(noisy, encoder.width, positions.width, of_data=True),  # A n
        Layer(blocks * k, proj.in_features, proj.out_features),
    ]
    # The loss, its gradient and two spreads read prediction and target; the gradient is written.
    compared = (3 * (a + FULL) + a) * blocks * k * proj.out_features
    # Only masked tokens are queries of the last block.
    shapes = [(known + k, known + k)] * (len(stack) - 1) + [(known + k, k)]
    sizes = (positions.width, _hidden(stack), ends, float(compared), _count(predictor), True)
    yield Tower("predictor", shapes, blocks, *sizes)


def _encoder(
    part: str, encoder: VisionTransformer, patches: int, prefix: int, a: int, after: float
) -> Tower:
    trained, n = part == "context encoder", patches + prefix
    pixels = encoder.channels * encoder.patch**2
    ends = [Layer(patches, pixels, encoder.width, of_data=True)]
    cut = (FULL + a) * patches * pixels  # images are read, and rows of a product written
    sizes = (encoder.width, _hidden(encoder.blocks), ends, cut + after, _count(encoder), trained)
    return Tower(part, [(n, n)] * len(encoder.blocks), 1, *sizes)


def _hidden(blocks: nn.ModuleList) -> int:
    return cast(Block, blocks[0]).mlp.fc1.out_features


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


# ------------------------------------------------------------------------------ work of one image


def _layers(tower: Tower) -> Iterator[Layer]:
    d, hidden = tower.width, tower.hidden
    for n, q in tower.blocks:
        n, q = n * tower.sequences, q * tower.sequences
        yield Layer(n, d, 3 * d)  # qkv
        yield Layer(q, d, d)  # proj
        yield Layer(q, d, hidden)
        yield Layer(q, hidden, d)
    yield from tower.ends


def _products(tower: Tower, a: int) -> Work:
    """A product per layer; backward two more, for the gradients of its input and of its weight."""
    found = Work()
    for layer in _layers(tower):
        n = 1 if not tower.trained else 2 if layer.of_data else 3
        flops = 2 * layer.tokens * layer.inputs * layer.outputs
        moved = a * layer.tokens * (layer.inputs + layer.outputs)  # of the three, two are read
        found += Work(flops, moved).times(n)
    return found


def _weights(tower: Tower, a: int) -> Work:
    """Weights as the products read them, forward and backward, and their gradient."""
    return Work(bytes=(3 if tower.trained else 1) * a * tower.parameters)


def _attention(tower: Tower, a: int) -> Work:
    """Scores and their use, and twice that backward; scores that a kernel recomputes count once."""
    flops = moved = 0.0
    for n, q in tower.blocks:
        q = q if tower.trained else n  # targets are gathered from the attention of all tokens
        flops += 4 * n * q * tower.width * (3 if tower.trained else 1)
        qkv, out = (q + 2 * n) * tower.width, q * tower.width
        moved += a * (qkv + out)
        if tower.trained:  # reads both and the gradient of `out`; writes that of qkv, packed
            moved += a * (qkv + out + 3 * n * tower.width)
    return Work(flops, moved).times(tower.sequences)


def _norms(tower: Tower, a: int, stream: int) -> Work:
    """LayerNorms, each with the addition to the residual stream before it, and sums of gradients.

    Forward reads the stream and what a branch adds, and writes the sum and its norm. Backward reads
    the stream, its gradient and that of the norm; it writes the gradient of the stream, also
    rounded, as the products of the branch read it.
    """
    (*_, (_, last)) = tower.blocks
    normed = sum(n + q for n, q in tower.blocks) + last  # norm1, norm2, and the final one
    each = 2 * stream + 2 * a
    if tower.trained:
        each += 3 * stream + 2 * a
        each += stream + a  # gradients of scale and shift: the stream and the gradient once more
    moved = normed * tower.sequences * tower.width * each + tower.other
    if tower.trained:  # gradients of biases: that of the output of every layer is read once more
        moved += sum(a * layer.tokens * layer.outputs for layer in _layers(tower))
    return Work(bytes=moved)


def _gelu(tower: Tower, a: int) -> Work:
    """Forward reads and writes the hidden layer; backward reads it and a gradient, writes one."""
    hidden = sum(q for _, q in tower.blocks) * tower.sequences * tower.hidden
    return Work(bytes=hidden * a * (5 if tower.trained else 2))


# ------------------------------------------------------------------------------ work of one update


def _casts(tower: Tower, a: int) -> Work:
    """Autocast rounds every weight to an activation, and gradients come back as float32."""
    if a == FULL:
        return Work()
    return Work(bytes=tower.parameters * (FULL + a) * (2 if tower.trained else 1))


def _optimizer(tower: Tower) -> Work:
    """AdamW reads weight, gradient and two moments and writes three of them; before that come the
    norm of gradients (one read) and weight decay (read, write). EMA: two reads, one write."""
    return Work(bytes=tower.parameters * FULL * ((4 + 3 + 1 + 2) if tower.trained else 3))
