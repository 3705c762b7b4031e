"""Networks of users as encoders: whatever they return, evaluations measure it."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from stopmim.data.pixels import MEAN, STD
from stopmim.data.sources.scenes import Scenes
from stopmim.evals.adapter import Adapter
from stopmim.evals.inputs import Inputs
from stopmim.evals.protocols import Knn, Linear
from stopmim.evals.request import ImageRequest
from stopmim.evals.suite import suite
from stopmim.method.encoder import VisionTransformer


class Tokens(nn.Module):
    """All tokens of a ViT with a class token, as models of transformers return them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.vit = VisionTransformer(32, 8, 24, 1, 2, class_token=True)

    def forward(self, images: Tensor) -> SimpleNamespace:
        return SimpleNamespace(last_hidden_state=self.vit(images, all_tokens=True))


def images(n: int = 2) -> Tensor:
    return torch.randn(n, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_tokens_before_the_patches_are_told_by_their_number() -> None:
    network = Tokens()
    encoder = Adapter(network, 32)
    assert (encoder.width, encoder.side, encoder.patch, encoder.pool) == (24, 4, 8, "cls")
    assert torch.equal(encoder(images()), network.vit(images()))
    for pool in ("cls", "mean"):
        assert torch.equal(
            encoder.features(images(), pool=pool), network.vit.features(images(), pool=pool)
        )
    index = torch.tensor([[0, 3], [5, 1]])
    assert torch.equal(encoder(images(), index)[1, 0], network.vit(images())[1, 5])


@torch.no_grad()
def test_maps_are_grids_of_tokens_and_vectors_are_features() -> None:
    torch.manual_seed(0)
    maps = nn.Conv2d(3, 5, 8, stride=8)
    grid, vector = Adapter(maps, 32), Adapter(nn.Sequential(maps, nn.Flatten()), 32)
    assert (grid.width, grid.patch, grid.pool) == (5, 8, "mean")
    assert torch.equal(grid(images())[0, 6], maps(images())[0, :, 1, 2])
    torch.testing.assert_close(grid.features(images()), maps(images()).mean(dim=(2, 3)))
    assert torch.equal(vector.features(images()), maps(images()).flatten(1))
    with pytest.raises(ValueError, match="no grid of patches"):
        vector(images())
    with pytest.raises(ValueError, match=r"expected \(B, D\)"):
        Adapter(nn.Flatten(0), 32)


@torch.no_grad()
def test_a_network_with_other_statistics_gets_the_same_picture() -> None:
    half = (0.5, 0.5, 0.5)
    pixels = torch.rand(2, 3, 32, 32)
    ours = (pixels - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    found = Adapter(nn.Flatten(), 32, mean=half, std=half).features(ours)
    torch.testing.assert_close(found, (2 * pixels - 1).flatten(1))


@torch.no_grad()
def test_a_network_of_half_precision_gets_halves() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 7)).bfloat16()
    found = Adapter(network, 32).features(images())
    assert torch.equal(found, network(images().bfloat16()))


def test_every_module_keeps_its_mode() -> None:
    network = nn.Sequential(nn.BatchNorm2d(3), nn.Dropout(), nn.Flatten()).train()
    network[0].eval()
    encoder = Adapter(network, 24)
    test = Scenes(8, size=24, seed=4)
    first, again = (Inputs(encoder, test, test).test_x for _ in range(2))
    assert torch.equal(first, again)  # no dropout
    assert [module.training for module in network] == [False, True, True]


def test_it_is_measured_and_never_cached(tmp_path: Path) -> None:
    """Equal weights, other code: a cache would give one the numbers of the other."""

    class Scaled(nn.Module):
        def __init__(self, power: float) -> None:
            super().__init__()
            self.powers = [power]  # in no hash

        def forward(self, images: Tensor) -> Tensor:
            return images.mean(dim=(2, 3)).sign() * images.std(dim=(2, 3)) ** self.powers[0]

    train, test = Scenes(96, size=24, seed=3), Scenes(64, size=24, seed=4)
    request = ImageRequest(label=("shape",), device="cpu")
    values = []
    for power in (1.0, -9.0):
        inputs = Inputs(Adapter(Scaled(power), 24), train, test, request)
        results = suite(inputs, [Knn(), Linear()])
        assert [r.protocol for r in results] == ["knn", "linear"]
        assert all(r.random_init is None for r in results)
        values.append((inputs.test_x, [r.value for r in results]))
    assert not torch.equal(values[0][0], values[1][0])
    assert values[0][1] != values[1][1]
