"""Benchmarks tracking against the usual script, on videos like those of DAVIS.

"Plain" does what eval_video_segmentation.py of DINO does as its README runs it, in its order: one
frame at a time is read, resized, encoded in float32, compared with all patches of up to eight
frames, and written as a PNG. It does not score what it found, which the DAVIS evaluation does
afterwards; ours reads, tracks and scores within its time.
"""

import math
import tempfile
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from stopmim.base.console import say
from stopmim.base.random_keys import numpy_generator
from stopmim.bench.timing import seconds_per_call, timed
from stopmim.data.pixels import MEAN, STD
from stopmim.data.videos import Bytes, Davis, Video, read_ahead, read_mask, write_mask
from stopmim.data.workers import cores
from stopmim.evals.features import evaluating
from stopmim.evals.inputs import open_encoder
from stopmim.evals.tracking import RED, Tracking, frame_size, results, score, track
from stopmim.gpu.devices import choose_device
from stopmim.method.encoder import Encoder

HEIGHT, WIDTH = 480, 854
REACH = 126  # pixels from the centre of an object to its farthest point
# Network, videos for each way, and frames of a video.
ON_GPU, ON_CPU = ("random:vit_b16@224", 2, 15, 70), ("random:vit_micro16@64", 1, 2, 6)


def tracking(device: str) -> dict[str, float]:
    """Frames per second of the plain script and of `track`, and J&F in percent of both.

    J&F and its difference are of the videos that both have seen; beside them stands what `track`
    finds in float32, as the script does: the rest of the difference is not one of precision. How
    fast files are read and frames are encoded, with nothing else to do, tells what `track` spends
    its time on.
    """
    where = choose_device(device)
    gpu = where.type == "cuda"
    name, few, many, length = ON_GPU if gpu else ON_CPU
    encoder = open_encoder(name)
    precision = torch.float16 if gpu else None  # as `eval tracking` has it
    ours = partial(track, encoder, options=Tracking(compat="released"), device=where)
    ours = partial(ours, precision=precision)
    with tempfile.TemporaryDirectory() as folder:
        say(f"tracking: writing {many} videos of {length} frames, {WIDTH}x{HEIGHT}")
        root = Path(folder)
        videos = write_videos(root / "davis", many, length)
        warm = write_videos(root / "warm", 1, 20 if gpu else 4)
        ours(videos=warm)  # also moves the encoder
        _plain(encoder, warm, where, root / "found")
        plain_seconds = timed(_plain, encoder, videos[:few], where, root / "found")
        seconds = timed(ours, videos=videos)
        plain_jf = _score(videos[:few], root / "found")
        jf = exact = 100 * ours(videos=videos[:few])[0].value
        if precision is not None:
            exact = 100 * ours(videos=videos[:few], precision=None)[0].value
        seen = videos[: 2 * few]
        reading = sum(map(len, seen)) / timed(_read, seen)
    encoding = _encode(encoder, where, precision)
    frames, plain_frames = many * length, few * length
    return {
        "plain_frames_per_s": round(plain_frames / plain_seconds, 2),
        "frames_per_s": round(frames / seconds, 2),
        "ratio": round(frames / seconds * plain_seconds / plain_frames, 2),
        "plain_jf": round(plain_jf, 3),
        "jf": round(jf, 3),
        "jf_difference": round(jf - plain_jf, 3),
        "jf_in_float32": round(exact, 3),
        "reading_frames_per_s": round(reading, 1),
        "encoding_frames_per_s": round(encoding, 1),
    }


def _read(videos: Sequence[Video]) -> None:
    """Reads all frames and masks, as `track` does."""
    with ThreadPoolExecutor(cores()) as pool:
        for video in read_ahead(videos, pool):
            for i in range(len(video)):
                video.frame(i)
                video.mask(i)


def _encode(encoder: Encoder, device: torch.device, precision: torch.dtype | None) -> float:
    """Frames per second of the encoder alone."""
    size = frame_size((HEIGHT, WIDTH), Tracking(), encoder.patch)
    frames = torch.randn(16 if device.type == "cuda" else 1, 3, *size, device=device)
    with evaluating(encoder), torch.autocast(device.type, precision, enabled=precision is not None):
        encoder(frames)
        return len(frames) / seconds_per_call(partial(encoder, frames), device)


# ------------------------------------------------------------------------------ the plain script


def _plain(encoder: Encoder, videos: Sequence[Video], device: torch.device, out: Path) -> None:
    with evaluating(encoder):  # writing masks waits for the GPU
        for video in videos:
            plain_script(encoder, video, device, out / video.name)


def plain_script(
    encoder: Encoder, video: Video, device: torch.device, out: Path, options: Tracking | None = None
) -> None:
    """Tracks the objects of one `video`, frame by frame, and writes masks as PNGs."""
    out.mkdir(parents=True)
    options, patch = options or Tracking(), encoder.patch
    pixels = plain_frame(video.frame(0), options.size).to(device)
    h, w = pixels.shape[-2] // patch, pixels.shape[-1] // patch
    mask = video.mask(0)
    write_mask(mask, out / f"{video.stem(0)}.png")
    small = Image.fromarray(mask).resize((w, h), Image.Resampling.NEAREST)
    labels = F.one_hot(torch.from_numpy(np.array(small)).long()).permute(2, 0, 1).float().to(device)
    place = torch.arange(h * w, device=device)
    apart = [(at[:, None] - at).abs() for at in (place // w, place % w)]
    window = ((apart[0] <= options.neighbourhood) & (apart[1] <= options.neighbourhood)).float()
    first = (F.normalize(encoder(pixels)[0], dim=1).T, labels.flatten(1))  # (D, h w), (C, h w)
    queue: deque[tuple[Tensor, Tensor]] = deque(maxlen=options.n_last_frames)
    for i in range(1, len(video)):
        pixels = plain_frame(video.frame(i), options.size).to(device)
        here = F.normalize(encoder(pixels)[0], dim=1).T
        sources = torch.stack([first[0], *(features for features, _ in queue)])  # (M, D, h w)
        given = torch.cat([first[1], *(soft for _, soft in queue)], dim=1)  # (C, M h w)
        affinity = torch.exp(sources.mT @ here / options.temperature)  # (M, h w, h w)
        affinity = (affinity * window).flatten(0, 1)
        least = affinity.topk(options.topk, dim=0).values[-1:]
        affinity[affinity < least] = 0
        soft = given @ (affinity / affinity.sum(dim=0, keepdim=True))
        queue.append((here, soft))
        large = F.interpolate(soft.view(1, -1, h, w), scale_factor=patch, mode="bilinear")[0]
        for channel in large:
            if channel.max() > 0:
                channel.sub_(channel.min()).div_(channel.max())
        ids = Image.fromarray(large.argmax(dim=0).byte().cpu().numpy())
        ids = ids.resize(mask.shape[::-1], Image.Resampling.NEAREST)
        write_mask(np.array(ids), out / f"{video.stem(i)}.png")


def plain_frame(frame: Bytes, size: int) -> Tensor:
    """A frame as the script shows it to the network, (1, 3, H, W)."""
    height, width = frame.shape[:2]
    wide = int(size * width / height) // 64 * 64
    pixels = torch.from_numpy(np.require(frame, requirements=["W"])).permute(2, 0, 1)[None].float()
    pixels = F.interpolate(pixels, (size, wide), mode="bilinear").round() / 255
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor((RED, *STD[1:])).view(3, 1, 1)
    return (pixels - mean) / std


def _score(videos: Sequence[Video], found: Path) -> float:
    """J&F in percent of the PNGs in `found`."""
    scores = []
    for video in videos:
        masks = [read_mask(path) for path in sorted((found / video.name).glob("*.png"))]
        scores += score(video, torch.from_numpy(np.stack(masks)))
    return 100 * results(scores)[0].value


# ------------------------------------------------------------------------------ the videos


def write_videos(root: Path, count: int, length: int) -> Davis:
    """Writes a folder as DAVIS's: objects of cloth drift and turn over a ground that pans."""
    names = [f"{root.name}-{i:02d}" for i in range(count)]
    (root / "ImageSets" / "2017").mkdir(parents=True)
    (root / "ImageSets" / "2017" / "val.txt").write_text("\n".join(names))
    with ThreadPoolExecutor(cores()) as pool:
        list(pool.map(partial(_write_video, root, length), names))
    return Davis(root)


def _write_video(root: Path, length: int, name: str) -> None:
    frames, masks = (root / part / "480p" / name for part in ("JPEGImages", "Annotations"))
    frames.mkdir(parents=True)
    masks.mkdir(parents=True)
    rng = numpy_generator("bench tracking", name)
    ground = texture(rng, HEIGHT + length, WIDTH + 2 * length)
    cloths, draws = [texture(rng, 2 * REACH, 2 * REACH) for _ in range(2)], rng.random((2, 4))
    dy, dx = np.mgrid[-REACH:REACH, -REACH:REACH]
    distance, angle = np.hypot(dy, dx), np.arctan2(dy, dx)
    for i in range(length):
        frame = ground[i : i + HEIGHT, 2 * i : 2 * i + WIDTH].copy()
        ids = np.zeros((HEIGHT, WIDTH), np.uint8)
        for k, (cloth, (a, b, c, d)) in enumerate(zip(cloths, draws, strict=True), 1):
            # An outline with four or five lobes around a centre that moves on an ellipse.
            turn = 2 * math.pi * (a + i / 100)
            top = round(HEIGHT * (0.4 + 0.2 * b) + 60 * math.sin(turn)) - REACH
            left = round(WIDTH * (0.4 * k - 0.1) + 90 * math.cos(turn)) - REACH
            lobes = 1 + 0.25 * np.cos((3 + k) * angle + 4 * c + i / 30)
            y, x = np.nonzero(distance < (70 + 30 * d) * lobes)
            frame[y + top, x + left], ids[y + top, x + left] = cloth[y, x], k
        Image.fromarray(frame).save(frames / f"{i:05d}.jpg", quality=90)
        write_mask(ids, masks / f"{i:05d}.png")


def texture(rng: np.random.Generator, height: int, width: int) -> Bytes:
    """Pixels with a colour of their own and detail at every scale, (height, width, 3)."""
    pixels = np.tile(60 + 140 * rng.random(3), (height, width, 1))
    for cell, c in product((256, 64, 16, 4), range(3)):
        grain = rng.standard_normal((height // cell + 2, width // cell + 2)).astype(np.float32)
        large = Image.fromarray(grain).resize((width, height), Image.Resampling.BICUBIC)
        pixels[..., c] += 16 * np.asarray(large)
    return pixels.clip(0, 255).astype(np.uint8)
