"""A run is a function of its config and data: not of workers, interruptions or how it is cut up."""

import contextlib
import errno
import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from stopmim import Run, pretrain
from stopmim.base.errors import (
    CheckpointError,
    DataError,
    InterruptedRunError,
    NonFiniteError,
    RunInUseError,
    StorageError,
    UserError,
)
from stopmim.base.files import read_jsonl
from stopmim.config.schema import Config
from stopmim.data.loading import loader
from stopmim.data.order import shares
from stopmim.data.sources.open import open_images
from stopmim.gpu.devices import choose_precision
from stopmim.method.build import build, configure, draw_masks
from stopmim.method.loss import Loss, masked_loss
from stopmim.method.model import MaskedImageModel
from stopmim.runs import checkpoint, saver
from stopmim.runs.lock import claimed
from stopmim.runs.run import git_state
from stopmim.train import loop as train
from stopmim.train import step as update
from stopmim.train import training
from stopmim.train.distributed import World
from stopmim.train.draws import draw_noise
from stopmim.weights.inspect import identify
from tiny import NoiseImages, assert_same_run, curve, tiny, tiny_mae, weights, write_folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Ten updates without an interruption."""
    return pretrain(NoiseImages(), tmp_path_factory.mktemp("whole"), tiny())


# ----------------------------------------------------------------------- interruptions


@pytest.mark.parametrize("stop", [1, 3, 4, 9])
def test_a_resumed_run_equals_an_uninterrupted_one(whole: Run, tmp_path: Path, stop: int) -> None:
    pretrain(NoiseImages(), tmp_path, tiny(), stop_at=stop)
    assert_same_run(pretrain(NoiseImages(), tmp_path, tiny()), whole)


def test_a_run_that_is_stopped_after_every_step_is_the_same_run(whole: Run, tmp_path: Path) -> None:
    for stop in range(1, 10):
        pretrain(NoiseImages(), tmp_path, tiny(), stop_at=stop)
    assert_same_run(pretrain(NoiseImages(), tmp_path, tiny()), whole)


@pytest.mark.parametrize("stop", [2, 4])
def test_a_run_that_is_as_far_as_it_is_asked_to_go_goes_no_further(
    tmp_path: Path, stop: int
) -> None:
    pretrain(NoiseImages(), tmp_path, tiny(), stop_at=4)
    assert pretrain(NoiseImages(), tmp_path, tiny(), stop_at=stop).checkpoint.name[-1] == "4"


@pytest.mark.parametrize(("name", "number"), [("term", signal.SIGTERM), ("int", signal.SIGINT)])
def test_a_signal_saves_the_step_it_came_in_and_ends_the_run(
    whole: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    monkeypatch.setattr("stopmim.base.faults._passed", Counter())
    monkeypatch.setenv("STOPMIM_FAULT", f"step.end@4:{name}")
    with pytest.raises(InterruptedRunError, match="saved at step 4") as caught:
        pretrain(NoiseImages(), tmp_path, tiny())
    assert caught.value.exit_code == 128 + number
    assert Run(tmp_path).checkpoint.name == "step-00000004"
    monkeypatch.delenv("STOPMIM_FAULT")
    assert_same_run(pretrain(NoiseImages(), tmp_path, tiny()), whole)


def test_signal_handlers_are_given_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    pretrain(NoiseImages(), tmp_path, tiny(), stop_at=1)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_training_works_outside_the_main_thread(whole: Run, tmp_path: Path) -> None:
    thread = threading.Thread(target=pretrain, args=(NoiseImages(), tmp_path, tiny()))
    thread.start()
    thread.join()
    assert_same_run(Run(tmp_path), whole)


def test_a_finished_run_is_left_alone(whole: Run) -> None:
    before = (whole.checkpoint / "manifest.json").read_bytes(), curve(whole)
    pretrain(NoiseImages(), whole.path, tiny())
    assert ((whole.checkpoint / "manifest.json").read_bytes(), curve(whole)) == before


# ------------------------------------------------------------- what must not change a run


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_workers_do_not_change_a_sample(tmp_path: Path, workers: int) -> None:
    folder = write_folder(tmp_path / "images")
    config = configure(tiny(data={"augmentation": "released"}))
    alone = loader(open_images(folder), config, 2, device=torch.device("cpu"))
    several = configure(config, {"runtime.workers": workers})
    together = loader(open_images(folder), several, 2, device=torch.device("cpu"))
    count = 0
    for a, b in zip(alone, together, strict=True):
        assert torch.equal(a.images, b.images)
        assert torch.equal(a.augmentation, b.augmentation)
        count += 1
    assert count == 8  # updates 2 to 9


def test_workers_do_not_change_a_run(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "images")
    alone = pretrain(folder, tmp_path / "0", tiny())
    assert alone.about["data"]["images"] == 40
    assert_same_run(pretrain(folder, tmp_path / "2", tiny(runtime={"workers": 2})), alone)


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_a_batch_in_parts_makes_the_same_update(whole: Run, tmp_path: Path, parts: int) -> None:
    run = pretrain(NoiseImages(), tmp_path, tiny(runtime={"accumulate": parts}))
    for a, b in zip(run.metrics, whole.metrics, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)


def test_noise_does_not_depend_on_how_the_batch_is_cut() -> None:
    config = configure(tiny(optim={"batch_size": 160}, positions={"tokens": "both"}))
    predictor, device = build(config).predictor, torch.device("cpu")

    def noise(parts: list[slice]) -> list[torch.Tensor]:
        drawn = [
            draw_noise(predictor, masks, part, config, 3, torch.float32)
            for masks, part in zip(draw_masks(config, 3, parts, device), parts, strict=True)
        ]
        masked = [n.masked for n in drawn if n.masked is not None]
        context = [n.context for n in drawn if n.context is not None]
        return [torch.cat(masked, dim=1), torch.cat(context)]

    whole = noise(shares(160, 1))
    for cut in (2, 5, 10):  # 80, 32 and 16 images: across chunks of 64 and inside them
        for a, b in zip(noise(shares(160, cut)), whole, strict=True):
            assert torch.equal(a, b)
    assert whole[0].shape == (4, 160, whole[0].shape[2], 96)
    assert whole[0].std() == pytest.approx(0.5, rel=0.02)  # sigma 0.25 is a variance


def test_masks_do_not_depend_on_how_the_batch_is_cut() -> None:
    config, device = configure(tiny(optim={"batch_size": 48})), torch.device("cpu")
    (whole,) = draw_masks(config, 5, shares(48, 1), device)
    parts = draw_masks(config, 5, shares(48, 6), device)
    assert torch.equal(whole.context, torch.cat([p.context for p in parts]))
    assert torch.equal(whole.targets, torch.cat([p.targets for p in parts], dim=1))
    (other,) = draw_masks(config, 6, shares(48, 1), device)
    assert not torch.equal(whole.context, other.context)


def test_no_draw_depends_on_the_global_generator(whole: Run, tmp_path: Path) -> None:
    torch.manual_seed(12345)
    before = torch.get_rng_state()
    assert_same_run(pretrain(NoiseImages(), tmp_path, tiny()), whole)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"positions.sigma": 0.5},
        {"positions.covariance": "fixed"},
        {"positions.covariance": "untied"},
        {"positions.tokens": "both"},
        {"positions.base": "learned"},
        {"positions.kind": "sincos"},
        {"positions.kind": "learned"},
        {"masking.kind": "random"},
        {"data.augmentation": "released"},
        {"optim.clip_grad": 0.01},
        {"optim.betas": [0.8, 0.9]},
        {"optim.freeze_epoch": 1},
    ],
    ids=str,
)
def test_what_defines_a_run_changes_its_weights(
    whole: Run, tmp_path: Path, change: dict[str, Any]
) -> None:
    once = {"runtime.save_every": 100}  # at the end
    run = pretrain(NoiseImages(), tmp_path, tiny(**change, **once))
    a, b = weights(run), weights(whole)
    shared = [name for name in a if name in b and name.startswith("encoder.blocks")]
    assert any(not torch.equal(a[name], b[name]) for name in shared)
    assert all(x.isfinite().all() for x in a.values())


def test_the_released_mode_trains(tmp_path: Path) -> None:
    """Its sampler wants more than ten patches per block, so the grid is finer than elsewhere."""
    config = tiny(compat="released", image_size=48, runtime={"accumulate": 2})
    run = pretrain(NoiseImages(), tmp_path, config, stop_at=3)
    assert run.config.positions.sigma == 0.0625
    start, end = build(run.config).predictor, run.model().predictor
    assert torch.equal(start.positions.mask_token, end.positions.mask_token)  # unused, so frozen
    assert not torch.equal(start.predictor_embed.bias, end.predictor_embed.bias)
    logged = [line["norm_mask_token"] for line in run.metrics]  # of the bias, which replaces it
    assert logged[-1] == float(end.predictor_embed.bias.detach().norm())
    assert len(set(logged)) == 3


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_follows_the_same_curve(whole: Run, tmp_path: Path, precision: str) -> None:
    run = pretrain(NoiseImages(), tmp_path, tiny(runtime={"precision": precision}))
    for a, b in zip(run.metrics, whole.metrics, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=0.05)


def test_a_gpu_that_only_emulates_bfloat16_gets_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    def supported(including_emulation: bool = True) -> bool:  # as of a V100 or a T4
        return including_emulation

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    assert choose_precision("auto", torch.device("cuda")) is torch.float16


def test_loss_scaling_is_resumed(tmp_path: Path) -> None:
    config = tiny(runtime={"precision": "fp16"}, optim={"epochs": 1})  # slow on a CPU
    whole = pretrain(NoiseImages(), tmp_path / "whole", config)
    pretrain(NoiseImages(), tmp_path / "cut", config, stop_at=2)
    assert checkpoint.state(Run(tmp_path / "cut").checkpoint)["scaler"]["_growth_tracker"] == 2
    assert_same_run(pretrain(NoiseImages(), tmp_path / "cut", config), whole)


@pytest.mark.filterwarnings("ignore:std")
def test_metrics_are_json_for_strict_readers_where_a_number_is_not_finite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The spread of a single hidden patch is NaN, a gradient that overflows in fp16 infinite."""
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=2.0**99))
    small = {"image_size": 8, "masking.ratio": 0.25, "optim.batch_size": 1}
    config = tiny_mae(**small, **{"runtime.precision": "fp16"})
    run = pretrain(NoiseImages(4), tmp_path, config, stop_at=2)
    text = (run.path / "metrics.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert [line.keys() & {"loss", "target_std", "grad_norm"} for line in run.metrics] == [
        {"loss"},
        {"loss"},
    ]


# ----------------------------------------------------------------------------- faults


@pytest.mark.parametrize(
    "about", ["[]", "3", "{}", '{"config": [], "data": {}, "starts": []}'], ids=ascii
)
def test_a_run_json_of_another_shape_is_no_run_to_go_on_with(about: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(about)
    for threads in (1, None):
        with pytest.raises(CheckpointError, match=r"not a run directory: run\.json (holds|is not)"):
            pretrain(NoiseImages(), tmp_path, tiny(**{"runtime.threads": threads}))
    assert (tmp_path / "run.json").read_text() == about


def test_a_run_whose_run_json_is_damaged_is_named_by_inspect(whole: Run, tmp_path: Path) -> None:
    shutil.copytree(whole.path, tmp_path / "run")
    (tmp_path / "run" / "run.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"run\.json is not as stopmim writes it"):
        identify(tmp_path / "run")


def test_a_loss_that_is_not_finite_stops_before_the_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretrain(NoiseImages(), tmp_path, tiny(), stop_at=4)
    before = weights(Run(tmp_path))
    steps = 0
    real = masked_loss

    def second_is_nan(*args: Any) -> Loss:
        nonlocal steps
        steps += 1
        out = real(*args)
        return out._replace(loss=out.loss * float("nan")) if steps == 2 else out

    models: list[MaskedImageModel] = []

    def keep(config: Config) -> MaskedImageModel:
        models.append(build(config))
        return models[-1]

    monkeypatch.setattr(update, "masked_loss", second_is_nan)
    monkeypatch.setattr(training, "build", keep)
    with pytest.raises(NonFiniteError, match="step 6") as caught:
        pretrain(NoiseImages(), tmp_path, tiny())
    assert caught.value.exit_code == 6
    assert Run(tmp_path).checkpoint.name == "step-00000004"
    for name, x in models[0].encoder.state_dict().items():
        assert x.isfinite().all(), name  # the bad update was not made in memory either
    for name, x in weights(Run(tmp_path)).items():
        assert torch.equal(x, before[name]), name


def test_broken_images_are_named_once_and_replaced(tmp_path: Path) -> None:
    images = NoiseImages(broken=(3, 17))
    config = tiny(data={"max_bad": 0.05})
    run = pretrain(images, tmp_path / "a", config)
    lines = [json.loads(x) for x in (run.path / "bad_files.jsonl").read_text().splitlines()]
    assert sorted(line["name"] for line in lines) == ["noise 17", "noise 3"]
    assert lines[0]["reason"] == "broken on purpose"
    pretrain(images, tmp_path / "b", config, stop_at=3)
    assert_same_run(pretrain(images, tmp_path / "b", config), run)
    assert len((tmp_path / "b" / "bad_files.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("broken", [(3, 17), tuple(range(40))])
def test_too_many_broken_images_end_the_run(tmp_path: Path, broken: tuple[int, ...]) -> None:
    share = 0.01 if len(broken) == 2 else 1.0
    with pytest.raises(DataError, match="of 40 images cannot be read") as caught:
        pretrain(NoiseImages(broken=broken), tmp_path, tiny(data={"max_bad": share}))
    assert caught.value.exit_code == 3


def test_fewer_images_than_a_batch_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="5 images do not fill one batch of 8"):
        pretrain(NoiseImages(5), tmp_path / "run", tiny())
    assert not (tmp_path / "run").exists()


def test_another_config_in_the_same_directory_is_refused(whole: Run) -> None:
    before = {p: p.read_bytes() for p in whole.path.rglob("*") if p.is_file()}
    with pytest.raises(UserError, match=r"optim.lr: 0.0003 -> 0.001") as caught:
        pretrain(NoiseImages(), whole.path, tiny(optim={"lr": 1e-3}))
    assert caught.value.exit_code == 2
    del before[whole.path / "run.lock"]
    assert all(p.read_bytes() == data for p, data in before.items())


def test_how_a_run_is_carried_out_may_change(tmp_path: Path, whole: Run) -> None:
    pretrain(NoiseImages(), tmp_path, tiny(), stop_at=3)
    run = pretrain(NoiseImages(), tmp_path, tiny(runtime={"log_every": 5, "keep": 3}))
    assert [s["runtime"]["log_every"] for s in run.about["starts"]] == [1, 5]
    expected = weights(whole)
    for name, x in weights(run).items():
        assert torch.equal(x, expected[name])


@pytest.mark.parametrize("place", ["", "runs/first", "../linked/first"])
def test_a_new_run_among_its_images_is_refused(place: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "images")
    (tmp_path / "linked").symlink_to(folder)
    before = sorted(folder.rglob("*"))
    with pytest.raises(UserError, match="lies in the folder of the images"):
        pretrain(folder, folder / place, tiny(), stop_at=1)
    assert sorted(folder.rglob("*")) == before
    pretrain(folder, folder / ".runs", tiny(), stop_at=1)  # hidden, so never an image


def test_a_new_run_beside_train_and_val_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path / "data" / "train")
    write_folder(tmp_path / "data" / "val")
    with pytest.raises(UserError, match="choose another --out"):  # a third folder: no splits then
        pretrain(tmp_path / "data", tmp_path / "data" / "runs" / "first", tiny(), stop_at=1)
    assert not (tmp_path / "data" / "runs").exists()
    with pytest.raises(UserError, match="lies in the folder"):
        pretrain(f"splits:{tmp_path}/data", tmp_path / "data" / "runs", tiny(), stop_at=1)


def test_other_images_in_the_same_directory_are_refused(whole: Run) -> None:
    with pytest.raises(DataError, match=r"40 .* then, 48 .* now"):
        pretrain(NoiseImages(48), whole.path, tiny())


def test_a_directory_in_use_is_refused_and_not_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with claimed(tmp_path), pytest.raises(RunInUseError, match=f"process {os.getpid()}") as caught:
        pretrain(NoiseImages(), tmp_path, tiny())
    assert caught.value.exit_code == 8
    assert not (tmp_path / "run.json").exists()


def test_a_file_system_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    said = r"run\.lock: cannot lock this file: No locks"
    with pytest.raises(StorageError, match=said), claimed(tmp_path / "run"):
        pass


def test_a_lock_that_its_last_owner_removes_at_that_moment_is_no_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two could have the run: one the lock that is gone, one that of the same name after it."""
    lock = fcntl.flock

    def late(file: int, how: int) -> None:
        (tmp_path / "run.lock").unlink()  # by one that failed before it began
        lock(file, how)

    monkeypatch.setattr("fcntl.flock", late)
    with pytest.raises(RunInUseError, match="run the same command again"), claimed(tmp_path):
        pass


def test_a_run_that_begins_on_a_full_disk_says_so(tmp_path: Path) -> None:
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, usual[1]))
    try:
        with pytest.raises(StorageError, match="cannot write here: File too large"):
            pretrain(NoiseImages(), tmp_path / "run", tiny())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)


def test_what_a_killed_process_leaves_behind_does_not_keep_its_run(tmp_path: Path) -> None:
    code = """
import os, signal, sys, time
from pathlib import Path
import torch.multiprocessing as mp
from stopmim.runs.lock import claimed
with claimed(Path(sys.argv[1])):
    worker = mp.Process(target=time.sleep, args=(30,), daemon=True)
    worker.start()
    Path(sys.argv[1], "pid").write_text(str(worker.pid))
    os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)])
    assert killed.returncode == -signal.SIGKILL
    worker = int((tmp_path / "pid").read_text())
    os.kill(worker, 0)  # it is still there
    try:
        with claimed(tmp_path):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)


def test_an_output_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StorageError, match="cannot write here"):
        pretrain(NoiseImages(), tmp_path / "file", tiny())
    assert (tmp_path / "file").read_text() == "mine"


def test_a_full_disk_is_survived_once_and_reported_at_the_end(
    whole: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = save_file, 0

    def full(tensors: Any, path: Path) -> None:
        nonlocal calls
        calls += 1
        if calls in (1, 2):
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        real(tensors, path)

    monkeypatch.setattr(saver, "save_file", full)
    run = pretrain(NoiseImages(), tmp_path, tiny())  # saves at 3 (fails), 6 (fails), 9, 10
    assert sorted(p.name for p in (run.path / "checkpoints").iterdir()) == [
        "step-00000009",
        "step-00000010",
    ]
    assert_same_run(run, whole)


def test_a_disk_that_stays_full_ends_the_run_with_its_checkpoints_intact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretrain(NoiseImages(), tmp_path, tiny(), stop_at=4)

    def full(tensors: Any, path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(saver, "save_file", full)
    with pytest.raises(StorageError, match="No space left on device") as caught:
        pretrain(NoiseImages(), tmp_path, tiny())
    assert caught.value.exit_code == 5
    assert Run(tmp_path).checkpoint.name == "step-00000004"
    assert not list((tmp_path / "checkpoints").glob(".tmp*"))


@pytest.mark.parametrize(("slow", "saved"), [(0.0, 6), (60.0, 8)])
def test_ranks_whose_updates_are_long_heed_a_signal_at_once_and_others_when_they_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: float, saved: int
) -> None:
    """One process that believes to be the first of two: it asks only itself."""
    steps = Counter[str]()

    def told_to_end(name: str) -> None:
        steps[name] += 1
        if steps[name] == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(train, "joined", lambda: contextlib.nullcontext(World(0, 2)))
    monkeypatch.setattr(train, "faultpoint", told_to_end)
    monkeypatch.setattr(train, "SLOW", slow)
    rare = tiny(runtime={"log_every": 4, "save_every": 100})
    with pytest.raises(InterruptedRunError, match=f"saved at step {saved}"):
        pretrain(NoiseImages(), tmp_path, rare)


def test_lines_for_which_a_disk_has_no_room_are_written_when_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The limit on the size of a file stands for the end of the disk."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)

    def disk(name: str) -> None:
        steps[name] += 1
        room = 10 if steps[name] in (4, 5) else usual[0]
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, usual[1]))

    steps = Counter[str]()
    monkeypatch.setattr(train, "faultpoint", disk)  # at the end of every step
    try:
        broken = tuple(range(0, 40, 4))
        run = pretrain(NoiseImages(broken=broken), tmp_path, tiny(**{"data.max_bad": 0.5}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert [line["step"] for line in run.metrics] == list(range(1, 11))
    listed = [line["name"] for line in read_jsonl(tmp_path / "bad_files.jsonl")]
    assert sorted(listed) == sorted(f"noise {i}" for i in broken)
    assert capsys.readouterr().err.count("cannot write: File too large") == 2  # once of each file


def test_an_old_checkpoint_that_cannot_be_removed_fails_no_save(
    whole: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pretrain(NoiseImages(), tmp_path / "run", tiny(), stop_at=3)
    old = Run(tmp_path / "run").checkpoint
    old.rename(tmp_path / "elsewhere")  # to a larger disk, by hand
    old.symlink_to(tmp_path / "elsewhere")
    assert_same_run(pretrain(NoiseImages(), tmp_path / "run", tiny()), whole)
    assert "could not be written" not in capsys.readouterr().err
    assert (tmp_path / "elsewhere" / "manifest.json").exists()


def test_a_torn_line_of_metrics_is_dropped(whole: Run, tmp_path: Path) -> None:
    pretrain(NoiseImages(), tmp_path, tiny(), stop_at=4)
    file = tmp_path / "metrics.jsonl"
    text = file.read_text()
    file.write_text(text + '{"step": 5, "lo')
    assert_same_run(pretrain(NoiseImages(), tmp_path, tiny()), whole)


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    whole: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pretrain(NoiseImages(), tmp_path, tiny(), stop_at=6)
    newest = Run(tmp_path).checkpoint / "model.safetensors"
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    assert_same_run(pretrain(NoiseImages(), tmp_path, tiny()), whole)
    assert "sha256 is not the recorded one; skipped" in capsys.readouterr().err


def test_a_run_whose_checkpoints_are_all_damaged_never_starts_again_from_nothing(
    tmp_path: Path,
) -> None:
    pretrain(NoiseImages(), tmp_path, tiny(), stop_at=4)
    for path in (tmp_path / "checkpoints").glob("*/state.json"):
        path.write_text("{}")
    with pytest.raises(CheckpointError, match="none of its 2 checkpoints is intact") as caught:
        pretrain(NoiseImages(), tmp_path, tiny())
    assert caught.value.exit_code == 4


def test_the_git_state_is_of_our_source_and_not_of_a_repository_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        command = ["git", "-C", str(tmp_path), *who, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    source = tmp_path / ".venv" / "stopmim" / "run.py"
    source.parent.mkdir(parents=True)
    source.write_text("a = 1\n")
    (tmp_path / "theirs.py").write_text("b = 1\n")
    monkeypatch.setattr("stopmim.runs.run.__file__", str(source))
    git("init", "-q")
    git("add", "theirs.py")
    git("commit", "-q", "-m", "theirs")
    ask = git_state.__wrapped__  # a process asks once
    assert ask() is None
    git("add", ".")
    git("commit", "-q", "-m", "ours")
    commit = git("rev-parse", "HEAD")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "run.lock").write_text("process 1\n")
    assert ask() == commit
    source.write_text("a = 2\n")
    assert ask() == f"{commit}+"
