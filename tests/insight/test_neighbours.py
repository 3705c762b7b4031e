"""Neighbours are those of the features, labels are counted right, and a map keeps who is near."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from matplotlib.patches import Rectangle

from helpers import seeded
from stopmim.base.errors import DataError
from stopmim.data.crops import normalise
from stopmim.data.subset import Subset
from stopmim.insight.figures import neighbours
from stopmim.insight.figures.layout import layout
from stopmim.method.build import build
from stopmim.runs.run import Run
from stopmim.train.loop import pretrain
from tiny import NoiseImages, tiny


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return pretrain(NoiseImages(), tmp_path_factory.mktemp("runs") / "run", tiny(), stop_at=2)


def labelled(n: int, **labels: np.ndarray) -> NoiseImages:
    images = NoiseImages(n)
    images.labels = labels
    return images


def test_both_encoders_see_the_same_images_and_the_first_is_the_untrained_one(run: Run) -> None:
    found = neighbours.find([run], NoiseImages(40, broken=(0, 7)))
    assert found.images.kept.tolist() == [i for i in range(40) if i not in (0, 7)]
    assert found.total == 40
    pixels = normalise(torch.from_numpy(found.pictures).permute(0, 3, 1, 2))
    for encoder, network in zip(
        found.encoders, (build(run.config).branch(), run.model().branch()), strict=True
    ):
        with torch.inference_mode():
            want = F.normalize(network.eval().features(pixels).double(), dim=1)
        torch.testing.assert_close(encoder.features, want, atol=1e-5, rtol=0)
    before, after = found.encoders
    assert not torch.allclose(before.features, after.features)


def test_neighbours_are_the_nearest_by_angle_and_never_the_image_itself() -> None:
    turns = torch.tensor([0.0, 0.1, 0.3, 0.7, 1.5, 3.1])
    lengths = torch.tensor([1.0, 9.0, 0.1, 5.0, 1.0, 2.0])
    points = lengths[:, None] * torch.stack([turns.cos(), turns.sin()], dim=1)
    nearest = neighbours.embedded("x", points).nearest
    assert nearest[0].tolist() == [1, 2, 3, 4, 5]
    assert nearest[3].tolist() == [2, 1, 0, 4, 5]


def test_an_encoder_that_has_not_changed_keeps_all_neighbours() -> None:
    points = torch.randn(60, 8, generator=seeded())
    before = neighbours.embedded("before", points)
    other = neighbours.embedded("other", torch.randn(60, 8, generator=seeded(1)))
    assert neighbours.kept(before, neighbours.embedded("after", 3 * points)) == 1
    assert neighbours.kept(before, other) == pytest.approx(6 / 59, abs=0.05)  # by chance


def test_the_number_of_images_is_bounded_and_smaller_for_a_large_encoder_on_a_cpu(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbours, "choose_device", lambda _: torch.device("cpu"))
    monkeypatch.setattr(neighbours, "SHOWN", 30)
    monkeypatch.setattr(neighbours, "FEWEST", 3)
    many = NoiseImages(100)
    assert len(neighbours.find([run], many).images) == 30
    encoder = run.model().branch()
    per_image = 2 * encoder.side**2 * sum(p.numel() for p in encoder.blocks.parameters())
    for images, want in ((10.5, 10), (0.1, 3)):
        monkeypatch.setattr(neighbours, "WORK", images * per_image)
        found = neighbours.find([run], many)
        assert len(found.images) == want
        assert found.images.kept[[0, -1]].tolist() == [0, 99]  # from end to end: of every class


def test_one_image_has_no_neighbours(run: Run) -> None:
    with pytest.raises(DataError, match="two images that can be read, found 1"):
        neighbours.find([run], NoiseImages(2, broken=(1,)))


def test_agreement_counts_pairs_of_known_label_against_chance() -> None:
    values = np.array([0, 0, 1, 1, -1])
    nearest = np.array([[1, 2], [0, 4], [3, 0], [4, 4], [0, 1]])
    # Known pairs: 0-1, 0-2, 1-0, 2-3, 2-0; of these 0-1, 1-0 and 2-3 are equal.
    assert neighbours.agreement(values, nearest) == pytest.approx(3 / 5)
    assert neighbours.by_chance(values) == pytest.approx(4 / 12)
    rng = np.random.default_rng(0)
    many = rng.integers(0, 4, 400) ** 2
    drawn = np.array([rng.choice(np.delete(np.arange(400), i), 50) for i in range(400)])
    assert neighbours.agreement(many, drawn) == pytest.approx(neighbours.by_chance(many), abs=0.02)


def test_labels_that_colours_cannot_tell_apart_are_merged_or_left_out() -> None:
    images = Subset(
        labelled(
            40, width=np.arange(40), sex=np.arange(40) % 2, **{"class": np.arange(40).clip(max=20)}
        ),
        range(40),
    )
    images.classes = [f"bird {i}" for i in range(21)]
    first, second = neighbours.kinds(images)
    assert (first.label, second.label) == ("class", "sex")
    assert len(first.names) == neighbours.KINDS
    assert (first.names[0], first.names[-1]) == ("bird 20", "10 others")
    assert set(first.of[20:]) == {0}
    assert (first.of == neighbours.KINDS - 1).sum() == 10
    assert second.names == ["class 0", "class 1"]


def test_the_figure_frames_neighbours_of_the_same_class(run: Run) -> None:
    found = neighbours.find([run], labelled(40, **{"class": np.arange(40) % 2}))
    rows = neighbours.queries(40)
    assert len(rows) == neighbours.QUERIES
    framed = [p for p in neighbours.figure(found).axes[0].patches if isinstance(p, Rectangle)]
    values = found.images.labels["class"]
    want = sum(int((values[e.nearest[q]] == values[q]).sum()) for e in found.encoders for q in rows)
    assert len(framed) == want
    texts = [text.get_text() for text in neighbours.figure(found).axes[0].texts]
    assert "of each of 40 images; 49 % by chance" in texts[-1]
    found.images.labels["class"][:10] = -1  # of unknown class
    texts = [text.get_text() for text in neighbours.figure(found).axes[0].texts]
    assert "of each of 30 images (10 unlabelled: no frame); 48 % by chance" in texts[-1]


def test_several_runs_stand_beside_the_untrained_one(run: Run, tmp_path: Path) -> None:
    other = pretrain(NoiseImages(), tmp_path / "larger", tiny(image_size=32, seed=1), stop_at=1)
    found = neighbours.find([run, other], NoiseImages())
    assert [e.name for e in found.encoders] == ["before training", "run", "larger"]


def test_a_map_keeps_who_is_near_and_is_always_the_same() -> None:
    centres = torch.randn(6, 32, generator=seeded())
    points = centres[torch.arange(150) % 6] + 0.5 * torch.randn(150, 32, generator=seeded(1))
    places = layout(points)
    assert np.array_equal(places, layout(points))
    assert (places.min(axis=0) == 0).all()
    assert (places.max(axis=0) == 1).all()
    from sklearn.decomposition import PCA  # a second
    from sklearn.manifold import trustworthiness

    flat = PCA(2).fit_transform(points.numpy())
    kept, plain = (trustworthiness(points, x, n_neighbors=6) for x in (places, flat))
    assert kept > 0.97 > plain


@pytest.mark.parametrize("n", [2, 3, 7])
def test_a_map_of_few_or_equal_images_is_finite(n: int) -> None:
    assert np.isfinite(layout(torch.randn(n, 8, generator=seeded()))).all()
    assert np.isfinite(layout(torch.ones(n, 8))).all()
