"""The script that tracking is compared with does what it is said to do."""

from pathlib import Path

import numpy as np
import pytest
import torch

from stopmim.bench import tracking as bench
from stopmim.bench.tracking import plain_script, write_videos
from stopmim.data.videos import read_mask
from stopmim.evals.features import evaluating
from stopmim.evals.tracking import Tracking, follow
from stopmim.method.encoder import VisionTransformer


def test_the_plain_script_finds_what_ours_finds(tmp_path: Path) -> None:
    torch.manual_seed(0)
    encoder, cpu = VisionTransformer(32, 8, 24, 2, 3), torch.device("cpu")
    (video,) = write_videos(tmp_path / "davis", 1, 5)
    assert video.frame(0).shape == (480, 854, 3)
    assert np.unique(video.mask(4)).tolist() == [0, 1, 2]
    options = Tracking(size=96, neighbourhood=4, compat="released")
    with evaluating(encoder):
        plain_script(encoder, video, cpu, tmp_path / "found", options)
        ours = torch.cat(list(follow(encoder, video, options)))
    found = np.stack([read_mask(path) for path in sorted((tmp_path / "found").iterdir())])
    assert (found[1:] != video.mask(0)).any()  # they move
    assert (found == ours.numpy()).mean() > 0.9995


@pytest.mark.slow
def test_both_ways_are_measured_in_one_run() -> None:
    found = bench.tracking("cpu")
    assert found["ratio"] == pytest.approx(
        found["frames_per_s"] / found["plain_frames_per_s"], rel=0.05
    )
    assert found["jf_difference"] == pytest.approx(0, abs=0.05)
    assert 50 < found["jf"] < 100
