"""The choice of a preset: what suits the images and the machine, what it costs, what is refused."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from stopmim import Run, pretrain
from stopmim.base.errors import UserError
from stopmim.base.tables import spoken
from stopmim.cli import main
from stopmim.cli.options import split_changes
from stopmim.config.presets import ENOUGH, IMAGENET, PRESETS
from stopmim.data.sources.open import open_images
from stopmim.data.workers import cores
from stopmim.method.build import build_sampler, configure
from stopmim.train import advice, cost
from stopmim.train.cost import Facts
from stopmim.train.plan import CANDIDATES, ROOM, Plan, choose, machine, plan_run
from tiny import NoiseImages

CPU, GPU = torch.device("cpu"), torch.device("cuda")
PHOTOS = Facts(count=300, side=335, read_seconds=0.002, reduced_seconds=0.002, workers=2)
SMALLER = {"arch": "vit_micro8", "image_size": 48, "optim.batch_size": 8, "runtime.workers": 0}
SMALLER |= {"masking.target_scale": [0.1, 0.2], "runtime.health_every": 0}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder of 40 photographs of 240 by 300 px."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for i in range(40):
        pixels = np.random.default_rng(i).integers(0, 255, (6, 5, 3), np.uint8)
        Image.fromarray(pixels).resize((240, 300)).save(folder / f"{i:02}.jpg")
    return folder


# ------------------------------------------------------------------------------ scaling


@pytest.mark.parametrize("name", [name for name in PRESETS if PRESETS[name].scales])
def test_epochs_follow_the_number_of_images(name: str) -> None:
    preset = PRESETS[name]
    made_for, epochs = preset.cost.images, preset.config.optim.epochs
    assert preset.for_images(made_for) == preset.config
    assert preset.for_images(made_for // 4).optim.epochs == 2 * epochs
    assert preset.for_images(4 * made_for).optim.epochs == epochs // 2
    for count in (300, 1_000, 20_000, IMAGENET):
        optim = preset.for_images(count).optim
        assert optim.epochs * (count // optim.batch_size) >= ENOUGH
        warm = preset.config.optim.warmup_epochs / epochs
        assert optim.warmup_epochs / optim.epochs == pytest.approx(warm, abs=0.01)
    assert preset.for_images(20).optim.batch_size == 16  # a batch must not exceed the images


def test_what_is_asked_for_is_not_scaled() -> None:
    preset = PRESETS["small_images"]
    asked = preset.for_images(300, {"optim": {"epochs": 1}, "optim.batch_size": 100})
    assert (asked.optim.epochs, asked.optim.batch_size) == (1, 100)
    assert asked.optim.warmup_epochs == pytest.approx(0.1)  # 3 of 30, and no longer than the run
    assert preset.for_images(300, {"optim.warmup_epochs": 5}).optim.warmup_epochs == 5
    paper = PRESETS["vit_b16_stop"]
    assert paper.for_images(300) == paper.config  # a published recipe stays as it is
    with pytest.raises(UserError, match=r"optim\.epochs: input should be a valid integer"):
        preset.for_images(300, {"optim.epochs": "many"})


@pytest.mark.parametrize("name", ["small_images", "tiny_cpu"])
def test_a_share_of_the_grid_is_seen_at_every_size(name: str) -> None:
    assert configure(name).masking.context_length == 24  # as before, when it was a number
    large = configure(name, {"arch": "vit_s16", "image_size": 224, "predictor.width": 192})
    assert large.masking.context_length == 74  # of 196; 24 would be an eighth of the image
    assert "74 patches seen" in build_sampler(large).describe()


# ------------------------------------------------------------------------------ choosing


@pytest.mark.parametrize(
    ("device", "side", "preset"),
    [
        (CPU, 335, "photos_cpu"),
        (CPU, 32, "photos_cpu"),
        (GPU, 32, "small_images"),
        (GPU, 96, "small_images"),
        (GPU, 128, "photos_s16"),
        (GPU, 4000, "photos_s16"),
        (GPU, 0, "photos_s16"),  # none could be read: `check` has more to say about that
    ],
)
def test_the_choice_is_by_device_and_size(device: torch.device, side: int, preset: str) -> None:
    assert choose(replace(PHOTOS, side=side), device) == preset
    low, high = PRESETS[preset].needs.pixels
    assert not side or low <= side <= (high or side)
    assert (PRESETS[preset].needs.hardware == "CPU") == (device.type == "cpu")


def test_pretrain_chooses_says_so_and_resumes_with_the_numbers_of_its_start(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    run = tmp_path / "run"
    words = ["pretrain", str(photos), "--out", str(run), "--runtime.device", "cpu"]
    for key, value in (SMALLER | {"optim.epochs": 3}).items():
        words += [f"--{key}", json.dumps(value).strip('"')]
    assert main(words) == 0
    first, *rest = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        r"preset photos_cpu for 40 images of 240 px on .*: about \d+ (second|minute)s?", first
    )
    assert len(first) <= 80
    assert "40 images are few to learn from" in " ".join(rest)
    config = Run(run).config
    assert (config.arch, config.optim.epochs, config.optim.batch_size) == ("vit_micro8", 3, 8)
    assert config.masking.context_length == 14  # 0.375 of a 6x6 grid, as a plain number
    assert config.runtime.threads == max(1, cores() // 2)
    # Another machine, or another version, would choose otherwise.
    monkeypatch.setitem(CANDIDATES, "cpu", ("small_images",))
    assert main([*words[:4], "--runtime.workers", "0"]) == 0
    assert "finished, all 15 updates are done" in capsys.readouterr().err
    assert Run(run).config == config


@pytest.mark.slow
def test_a_preset_that_scales_resumes_exactly(tmp_path: Path) -> None:
    options: dict[str, Any] = {"runtime.device": "cpu", **SMALLER}
    options |= {"optim.epochs": 2}
    whole = pretrain(NoiseImages(), tmp_path / "whole", "photos_cpu", **options)
    pretrain(NoiseImages(), tmp_path / "cut", "photos_cpu", stop_at=7, **options)
    cut = pretrain(NoiseImages(), tmp_path / "cut", "photos_cpu", **options)
    files = [run.checkpoint / "model.safetensors" for run in (whole, cut)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_mistake_is_reported_before_any_image_is_looked_for(tmp_path: Path) -> None:
    wrong: dict[str, Any] = {"positions.sgima": 1}
    with pytest.raises(UserError, match=r'did you mean "positions\.sigma"'):
        pretrain(tmp_path / "nowhere", tmp_path / "run", **wrong)


@pytest.mark.parametrize(
    ("data", "out"),
    [
        ("/data/my photos/", "'/data/my photos/' --preset photos_cpu --out runs/my-photos"),
        ("photos.npz", "photos.npz --preset photos_cpu --out runs/photos"),
        ("scenes:64:48", "scenes:64:48 --preset photos_cpu --out runs/scenes"),
        ("..", ".. --preset photos_cpu --out runs/first"),
    ],
)
def test_a_command_can_be_pasted_as_it_is(data: str, out: str) -> None:
    changes = {"positions": {"sigma": 0.1}, "optim.ema": [0.9, 1.0], "init": None}
    words = " --positions.sigma 0.1 --optim.ema '[0.9, 1.0]' --init null --out "
    plan = plan_run("photos_cpu", changes, PHOTOS, CPU)
    assert plan.command(data) == f"stopmim pretrain {out}".replace(" --out ", words)


def test_a_command_says_lists_as_the_command_line_reads_them() -> None:
    changes = {"positions.levels": [0.25, 1, 4], "optim.ema": [0.9, 1], "data.crop_pixels": [9, 99]}
    command = plan_run("photos_cpu", changes, PHOTOS, CPU).command("photos")
    assert split_changes(shlex.split(command))[1] == changes


def test_a_command_names_a_run_directory_that_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = plan_run("photos_cpu", {}, PHOTOS, CPU)
    for name in ("photos", "photos-2", "photos-3"):
        assert plan.command("photos.npz").endswith(f" --out runs/{name}")
        (tmp_path / "runs" / name).mkdir(parents=True)
    assert plan.command("photos.npz", "-better").endswith(" --out runs/photos-better")


def test_one_photograph_is_one_and_not_called_usable(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in sorted(photos.iterdir())[1:]:
        file.unlink()
    assert main(["check", str(photos), "--runtime.device", "cpu", "--runtime.workers", "0"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "verdict readable, but nothing can be learned from a single image" in text
    assert "stopmim pretrain" not in text
    plan = plan_run("photos_cpu", {"optim.epochs": 1}, replace(PHOTOS, count=1), CPU)
    assert plan.what.endswith(" 1 epoch of 1 update with 1 image")
    assert plan.where.startswith("1 image of 335 px")
    assert "1 image is few to learn from" in " ".join(advice.warnings(plan))


def test_a_batch_is_cut_until_it_fits_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure("photos_s16", {"runtime.precision": "bf16"})
    whole, half = (cost.memory(configure(config, {"runtime.accumulate": n}), GPU) for n in (1, 2))
    free = (whole + half) / 2 / ROOM  # enough for half a batch, but not for a whole one
    for available, parts in ((2 * free, 1), (free, 2), (1.0, 64)):
        monkeypatch.setattr(cost, "free_memory", lambda _, n=available: n)
        plan = plan_run("photos_s16", {"runtime.precision": "bf16"}, PHOTOS, GPU)
        assert plan.config.runtime.accumulate == parts
        asked = {"runtime.precision": "bf16", "runtime.accumulate": 4}
        assert plan_run("photos_s16", asked, PHOTOS, GPU).config.runtime.accumulate == 4


def test_few_images_do_not_mean_a_checkpoint_every_second() -> None:
    for count in (300, 10**6):
        plan = plan_run("photos_cpu", {}, replace(PHOTOS, count=count), CPU)
        assert plan.config.runtime.save_every is None  # by the clock
    asked = plan_run("photos_cpu", {"runtime.save_every": 9}, PHOTOS, CPU)
    assert asked.config.runtime.save_every == 9


# ------------------------------------------------------------------------------ what it costs


@pytest.mark.parametrize("name", [n for n in PRESETS if PRESETS[n].needs.memory_gib])
def test_the_memory_of_an_update_is_what_was_measured(name: str) -> None:
    needs = PRESETS[name].needs
    config = configure(name, {"runtime.precision": "bf16", "optim.batch_size": needs.batch})
    device = CPU if needs.hardware == "CPU" else GPU
    assert cost.memory(config, device) / 2**30 == pytest.approx(needs.memory_gib, rel=0.15)


def test_an_update_is_measured_in_a_second_and_leaves_no_trace() -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    config = configure("photos_cpu", {**SMALLER, "runtime.threads": 1})
    seconds = cost.seconds_per_update(config, replace(PHOTOS, workers=0), CPU)
    assert 8 * PHOTOS.read_seconds < seconds < 60  # reading eight images alone takes that long
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_a_sample_is_enough_to_know_images_by() -> None:
    facts = cost.look(NoiseImages(40, broken=(0, 39)))
    assert facts.count == 40
    assert facts.side == min(NoiseImages(1).images[0].shape[:2])
    assert cost.look(NoiseImages(3, broken=(0, 1, 2))).side == 0


def test_a_size_of_which_a_sample_is_not_sure_is_called_about_that(tmp_path: Path) -> None:
    for i, side in enumerate((100, 200, 300)):
        Image.new("RGB", (side, 400)).save(tmp_path / f"{i}.png")
    plan = plan_run("photos_cpu", {}, cost.look(open_images(tmp_path)), CPU)
    assert plan.where.startswith("3 images of about 200 px on ")
    assert plan_run("photos_cpu", {}, PHOTOS, CPU).where.startswith(
        f"{PHOTOS.count:,} images of {PHOTOS.side} px on "
    )


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.2, "1 second"),
        (89, "89 seconds"),
        (360, "6 minutes"),
        (7200, "2 hours"),
        (1e7, "116 days"),
    ],
)
def test_durations_are_said_as_people_say_them(seconds: float, words: str) -> None:
    assert spoken(seconds) == words


# ------------------------------------------------------------------------------ objections


@pytest.mark.parametrize("name", [n for n in PRESETS if PRESETS[n].needs.hardware == "GPUs"])
def test_a_paper_scale_preset_is_refused_on_a_cpu_with_the_command_to_use(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    words = ["pretrain", "my photos", "--preset", name, "--out", str(out)]
    start = ["--init", "x"] if PRESETS[name].needs.init else []
    assert main([*words, "--seed", "7", "--runtime.device", "cpu", *start]) == 2
    (line,) = capsys.readouterr().err.splitlines()  # though there are no such images
    assert line.startswith(f"stopmim: error: {name} is made for GPUs: on ")
    command = shlex.split(line.partition("; use ")[2])
    kept = ["--seed", "7", "--runtime.device", "cpu"]  # an encoder to start from does not fit
    assert command == ["stopmim", *words[:3], "photos_cpu", *kept, *words[-2:]]
    assert not out.exists()


def test_a_preset_for_one_gpu_is_not_refused_nor_a_paper_one_made_small(tmp_path: Path) -> None:
    small = configure("vit_b16_stop", {"optim.batch_size": 16})
    for config in (small, *(configure(n) for n in ("photos_b16", "small_images", "tiny_cpu"))):
        advice.refuse_hopeless(config, config, CPU, "photos", tmp_path, {})


@pytest.mark.parametrize(
    ("preset", "changes", "facts", "device", "said"),
    [
        ("small_images", {}, {}, GPU, "335 px are reduced to 64 px"),
        ("photos_s16", {}, {"side": 800}, GPU, ""),
        ("small_images", {}, {"side": 100}, GPU, ""),
        ("photos_s16", {"optim.epochs": 1}, {}, GPU, "78 updates are too few to learn from; try"),
        ("photos_s16", {}, {"count": 500}, GPU, "500 images are few to learn from"),
        ("vit_b16_stop", {}, {"count": 9}, GPU, "9 images do not fill one batch of 2048"),
    ],
)
def test_objections(
    preset: str, changes: dict[str, Any], facts: dict[str, Any], device: torch.device, said: str
) -> None:
    found = replace(PHOTOS, **({"count": 5000} | facts))
    config = configure(PRESETS[preset].for_images(found.count, changes))
    warned = advice.warnings(Plan(preset, changes, config, found, device))
    assert said in " ".join(warned)
    assert len(warned) == bool(said)


def test_photographs_that_take_longer_to_read_than_to_learn_from_are_told() -> None:
    large = Facts(count=5000, side=3000, read_seconds=10.0, reduced_seconds=4.0, workers=2)
    for facts, told in ((large, True), (replace(large, read_seconds=1e-6), False)):
        plan = plan_run("photos_cpu", {**SMALLER, "image_size": 96}, facts, CPU)
        said = " ".join(advice.warnings(plan))
        assert ("reading images of 3000 px takes most of the time" in said) == told


def test_the_time_of_a_run_counts_reading_as_its_config_does() -> None:
    facts = Facts(count=5000, side=3000, read_seconds=10.0, reduced_seconds=4.0, workers=2)
    config = plan_run("photos_cpu", {}, facts, CPU).config
    assert facts.reading(config) == 4
    assert facts.reading(configure(config, {"data.decode": "whole"})) == 10
    assert replace(facts, side=500).reading(config) == 10  # too small to be reduced


def test_a_preset_for_a_gpu_is_told_how_long_it_takes_without_one(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = ["--arch", "vit_micro16", "--masking.target_scale", "0.1", "0.2"]
    tiny += ["--runtime.workers", "0"]
    words = ["check", str(photos), "--preset", "small_images", "--runtime.device", "cpu", *tiny]
    assert main(words) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert re.search(r"small_images is made for a GPU, and there is none: about \d+ \w+ here", text)
    assert "--preset photos_cpu is for CPUs" in text
    assert "240 px are reduced to 64 px" in text


# ------------------------------------------------------------------------------ what is said


def test_check_recommends_three_commands_that_work_as_they_stand(
    photos: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(photos.parent)
    changed = "--runtime.device cpu --runtime.workers 0"
    assert main(["check", "photos", *changed.split()]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    commands = [line.strip() for line in lines if line.startswith("  stopmim pretrain")]
    assert max(len(line) for line in lines if line.strip() not in commands) <= 80
    best, faster, better = commands
    outs = [shlex.split(command)[-1] for command in commands]
    assert outs == ["runs/photos", "runs/photos-faster", "runs/photos-better"]
    assert best == f"stopmim pretrain photos --preset photos_cpu {changed} --out runs/photos"
    assert re.search(r"about \d+ \w+, 0\.\d GiB of memory\n", text)
    assert f"for 40 images of 240 px on {machine(CPU)}: without a GPU" in text
    epochs = []
    for command in (faster, best, better):
        assert main([*shlex.split(command)[1:], "--dry-run"]) == 0
        epochs.append(int(re.findall(r"epochs: (\d+)", capsys.readouterr().out)[0]))
    # 2 updates per epoch; a quarter of the epochs would be too few to learn from.
    assert epochs == [ENOUGH // 4, epochs[1], epochs[1] * 4]
    assert "too few to learn from" not in text
    plan = plan_run("photos_cpu", {"optim.epochs": epochs[0]}, replace(PHOTOS, count=40), CPU)
    assert "updates" not in " ".join(advice.warnings(plan))
    # And `pretrain` alone would do the same as the first.
    same = []
    for words in (shlex.split(best)[1:], ["pretrain", "photos", *changed.split(), "--out", "x"]):
        assert main([*words, "--dry-run"]) == 0
        same.append(capsys.readouterr().out)
    assert same[0] == same[1]


def test_a_dry_run_without_its_images_says_whose_epochs_it_shows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["pretrain", "nowhere", "--preset", "small_images", "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert "epochs: 30 " in out
    assert "these are the epochs for 50,000 images" in err
    assert main(["pretrain", "nowhere", "--dry-run"]) == 3
    assert json.loads(re.findall(r"context_length: (\S+)", out)[0]) == 24
