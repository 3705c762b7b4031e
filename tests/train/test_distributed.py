"""A run is the same run on any number of processes, and ends as one when one of them fails."""

import functools
import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ranks import complaints, finish, launched, start, together
from stopmim import Run, pretrain
from stopmim.base.errors import DataError, UserError
from stopmim.base.files import read_jsonl
from stopmim.cli import main
from stopmim.config.schema import Config, override
from stopmim.data.loading import loader
from stopmim.data.order import batch_keys, shares
from stopmim.method.build import build, configure, draw_masks
from stopmim.method.loss import Loss, masked_loss
from stopmim.method.masks import MultiBlock
from stopmim.train import distributed, training
from stopmim.train import step as update
from stopmim.train.distributed import joined
from stopmim.train.draws import draw_noise
from tiny import NoiseImages, assert_same_run, tiny, tiny_mae

LONG = {"epochs": 4}  # 20 updates


def train_on(size: int, out: Path, config: Config, **options: Any) -> Run:
    """A whole run on `size` ranks, or in this process for 1; it must end well."""
    if size == 1:
        return pretrain(NoiseImages(), out, config, **options)
    logs = out.with_name(f"{out.name}-logs")
    ended = together(size, logs, lambda _: pretrain(NoiseImages(), out, config, **options))
    assert [rank.code for rank in ended] == [0] * size, ended
    assert all(not rank.said for rank in ended[1:]), ended  # rank 0 alone speaks
    return Run(out)


def assert_close(a: Run, b: Run, steps: int | None = None) -> None:
    assert [line["step"] for line in a.metrics] == [line["step"] for line in b.metrics][:steps]
    for x, y in zip(a.metrics, b.metrics[:steps], strict=True):
        assert x["loss"] == pytest.approx(y["loss"], rel=1e-5)
        assert x["grad_norm"] == pytest.approx(y["grad_norm"], rel=1e-4)
        assert x["norm_A"] == pytest.approx(y["norm_A"], rel=1e-5)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Twenty updates in one process."""
    return pretrain(NoiseImages(), tmp_path_factory.mktemp("whole"), tiny(optim=LONG))


@pytest.fixture(autouse=True)
def less_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stopmim.train.distributed.GRACE", 1.5)


# ------------------------------------------------------------------------ the same run


def test_two_ranks_make_the_updates_of_one(whole: Run, tmp_path: Path) -> None:
    run = train_on(2, tmp_path / "run", tiny(optim=LONG))
    assert_close(run, whole)
    assert run.about["starts"][0]["processes"] == 2


def test_two_ranks_with_four_parts_make_the_updates_of_one(whole: Run, tmp_path: Path) -> None:
    config = tiny(optim=LONG, runtime={"accumulate": 4})
    assert_close(train_on(2, tmp_path / "run", config), whole)


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_ranks_that_average_gradients_themselves_make_the_same_updates(
    whole: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accumulate: int
) -> None:
    """As they do on GPUs, where parts are recorded and no hook of DDP can be."""
    monkeypatch.setattr(training, "is_recorded", lambda *_: True)
    monkeypatch.setattr(training, "recorded", lambda step, _: step.keep_gradients())
    monkeypatch.setattr(DistributedDataParallel, "__init__", None)  # is never made
    config = tiny(optim=LONG, runtime={"accumulate": accumulate})
    train_on(2, tmp_path / "run", config, stop_at=7)
    run = train_on(2, tmp_path / "run", config)
    assert_close(run, whole)
    other = train_on(2, tmp_path / "other", config)
    assert [line["loss"] for line in run.metrics] == [line["loss"] for line in other.metrics]


def test_ranks_that_average_gradients_themselves_begin_with_the_weights_of_rank_0(
    tmp_path: Path,
) -> None:
    def job(rank: int) -> None:
        with joined() as world:
            model = build(configure(tiny()))
            model.encoder.norm.bias.data += rank
            assert len({*world.gather(digest_of(model))}) == 2
            distributed.parallelise(model, world, "step")
            assert len({*world.gather(digest_of(model))}) == 1

    ended = together(2, tmp_path, job)
    assert [rank.code for rank in ended] == [0, 0], ended


def digest_of(model: torch.nn.Module) -> str:
    state = [x.numpy().tobytes() for x in model.state_dict().values()]
    return hashlib.sha256(b"".join(state)).hexdigest()


def test_shards_of_the_model_make_the_same_updates(tmp_path: Path) -> None:
    """FSDP2 with two parts per rank, clipped gradients: then its checkpoint goes on in one."""
    config = tiny(optim={"clip_grad": 0.05}, runtime={"health_every": 3})
    alone = train_on(1, tmp_path / "alone", config)
    config = override(config, {"runtime": {"parallel": "fsdp", "accumulate": 4}})
    train_on(2, tmp_path / "run", config, stop_at=4)
    run = train_on(1, tmp_path / "run", config)
    assert_close(run, alone)
    assert run.metrics[0]["random_init"] == alone.metrics[0]["random_init"]
    for key in ("target_rank", "skill", "noise_to_signal", "neighbours"):  # step 3: in shards
        assert run.metrics[2][key] == pytest.approx(alone.metrics[2][key], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_ranks_penalise_the_matrix_once_and_predict_two_resolutions(
    tmp_path: Path, parallel: str
) -> None:
    changes: dict[str, Any] = {
        "positions": {"kind": "sincos"},
        "lowres": "max",
        "masking": {"targets": 2, "target_scale": [0.3, 0.4], "context_scale": [1.0, 1.0]},
        "optim": {"penalty_l1": 1e-3, "penalty_l2": 1e-2},
    }
    alone = train_on(1, tmp_path / "alone", tiny(**changes))
    config = tiny(**changes, runtime={"parallel": parallel, "accumulate": 4})
    run = train_on(2, tmp_path / "run", config)
    assert_close(run, alone)
    for a, b in zip(run.metrics, alone.metrics, strict=True):
        assert a["penalty"] == pytest.approx(b["penalty"], rel=1e-5)


@pytest.mark.slow
def test_a_checkpoint_of_whole_models_goes_on_in_shards(whole: Run, tmp_path: Path) -> None:
    config = tiny(optim=LONG)
    train_on(2, tmp_path / "run", config, stop_at=3)
    train_on(2, tmp_path / "run", tiny(optim=LONG, runtime={"parallel": "fsdp"}), stop_at=5)
    run = train_on(2, tmp_path / "run", config, stop_at=7)
    assert_close(run, whole, steps=7)
    assert [s["processes"] for s in run.about["starts"]] == [2, 2, 2]


@pytest.mark.slow
def test_a_model_without_target_encoder_makes_the_same_updates(tmp_path: Path) -> None:
    """MAE + StoP: two whole models, then their checkpoint in shards."""
    config = tiny_mae(positions={"kind": "stochastic", "share": 0.5, "ramp": 1.0})
    alone = train_on(1, tmp_path / "alone", config, stop_at=4)
    train_on(2, tmp_path / "run", config, stop_at=2)
    sharded = override(config, {"runtime.parallel": "fsdp"})
    assert_close(train_on(2, tmp_path / "run", sharded, stop_at=4), alone)


def test_one_then_two_then_one_rank_is_the_same_run(
    whole: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank notes the images and masks of its parts: together they are those of one."""
    note_draws(monkeypatch, tmp_path / "draws")
    config = tiny(optim=LONG)
    train_on(1, tmp_path / "run", config, stop_at=6)
    train_on(2, tmp_path / "run", config, stop_at=13)
    assert_close(train_on(1, tmp_path / "run", config), whole)
    noted = sorted((tmp_path / "draws").read_text().splitlines())
    assert noted == sorted(f"{i:02} {what}" for i in range(20) for what in draws_of(config, i))


def note_draws(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    real_masks, real_loader = MultiBlock.at_step, loader

    def masks(self: Any, seed: int, step: int, parts: list[slice], *more: Any) -> Any:
        drawn = real_masks(self, seed, step, parts, *more)
        with file.open("a") as notes:
            for part, one in zip(parts, drawn, strict=True):
                for place in range(part.start, part.stop):
                    notes.write(f"{step:02} mask {place} {digest(one, place - part.start)}\n")
        return drawn

    def numbered(images: Any, config: Config, start: int, **options: Any) -> Any:
        order = order_of(config, start, options["rank"], options["world"])
        parts = shares(config.optim.batch_size, 1, options["rank"], options["world"])
        for i, loaded in enumerate(real_loader(images, config, start, **options)):
            with file.open("a") as notes:
                for place, (_, number) in enumerate(order[i], start=parts[0].start):
                    notes.write(f"{start + i:02} image {place} {number}\n")
            yield loaded

    monkeypatch.setattr(MultiBlock, "at_step", masks)
    monkeypatch.setattr(training, "loader", numbered)


def order_of(config: Config, first: int, rank: int, world: int) -> list[list[tuple[int, int]]]:
    cut = shares(config.optim.batch_size, config.runtime.accumulate, rank, world)
    return list(batch_keys(NoiseImages(40), config, first, shares=cut, steps_per_epoch=5))


def draws_of(config: Config, step: int) -> list[str]:
    (masks,) = draw_masks(configure(config), step, shares(8, 1), torch.device("cpu"))
    images = order_of(config, 0, 0, 1)[step]
    return [f"mask {i} {digest(masks, i)}" for i in range(8)] + [
        f"image {i} {number}" for i, (_, number) in enumerate(images)
    ]


def digest(masks: Any, i: int) -> str:
    data = masks.context[i].numpy().tobytes() + masks.targets[:, i].contiguous().numpy().tobytes()
    return hashlib.sha256(data).hexdigest()[:12]


@pytest.mark.parametrize(
    ("compat", "workers"),
    [
        ("none", 0),
        ("released", 0),
        *(pytest.param("none", workers, marks=pytest.mark.slow) for workers in (1, 2, 4)),
    ],
)
def test_every_number_of_ranks_sees_the_same_samples_masks_and_noise(
    compat: str, workers: int
) -> None:
    """The released masks depend on the parts: those of 24 parts, on any number of ranks."""
    side = {"image_size": 48, "masking": {"compat": compat}}
    runtime = {"accumulate": 24, "workers": workers}
    config = configure(tiny(optim={"batch_size": 72, "epochs": 1}, runtime=runtime, **side))
    images, device, predictor = NoiseImages(150), torch.device("cpu"), build(config).predictor

    def seen(world: int) -> list[torch.Tensor]:
        per_rank = []
        for rank in range(world):
            batches = loader(images, config, 1, device=torch.device("cpu"), rank=rank, world=world)
            parts = shares(72, 24, rank, world)
            assert len(parts) == 24 // world
            for part, masks in zip(parts, draw_masks(config, 1, parts, device), strict=True):
                noise = draw_noise(predictor, masks, part, config, 1, torch.float32)
                assert noise.masked is not None
                per_rank.append((next(batches).images, *masks, noise.masked))
        return [x for part in per_rank for x in part]

    alone = seen(1)
    for world in (2, 3, 4, 6, 8):
        for a, b in zip(seen(world), alone, strict=True):
            assert torch.equal(a, b), world


def test_parts_are_counted_over_all_ranks() -> None:
    assert shares(48, 8) == [p for rank in range(4) for p in shares(48, 8, rank, 4)]
    assert shares(48, 1, 2, 3) == [slice(32, 48)]
    assert [len(shares(48, 3, rank, 2)) for rank in range(2)] == [2, 2]


@pytest.mark.parametrize(("batch", "accumulate", "world"), [(8, 1, 3), (8, 4, 3), (8, 1, 16)])
def test_a_batch_that_cannot_be_shared_names_the_numbers_that_can(
    batch: int, accumulate: int, world: int
) -> None:
    with pytest.raises(UserError, match=f"{batch} images cannot be shared by {world}") as caught:
        shares(batch, accumulate, 0, world)
    listed = re.search(r"; ([\d, ]+) GPUs work", str(caught.value))
    assert listed
    for count in map(int, listed[1].split(",")):
        assert sum(len(range(8)[part]) for part in shares(batch, accumulate, 0, count)) * count == 8


# ------------------------------------------------------------------------------ faults


def only_on(rank: int, fault: str) -> Callable[[int], None]:
    def set_fault(here: int) -> None:
        if here == rank:
            os.environ["STOPMIM_FAULT"] = fault

    return set_fault


def failing(rank: int, error: Exception, here: int) -> None:
    """Makes the third part that `rank` compares raise `error`."""
    real, calls = masked_loss, 0

    def compare(*args: Any) -> Loss:
        nonlocal calls
        calls += 1
        if here == rank and calls == 3:
            raise error
        return real(*args)

    update.__dict__["masked_loss"] = compare  # in a fork


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_one_rank_is_one_line_from_that_rank(tmp_path: Path, rank: int) -> None:
    def job(here: int) -> None:
        failing(rank, DataError("the images melted"), here)
        pretrain(NoiseImages(), tmp_path / "run", tiny())

    ended = together(2, tmp_path / "logs", job)
    assert complaints(ended) == ["stopmim: error: the images melted"]
    assert "melted" in ended[rank].said
    assert ended[rank].code == 3
    assert ended[1 - rank].code in (3, 7)  # 7: the store went with rank 0
    assert not list((tmp_path / "run").glob("crash*"))


def test_a_bug_on_one_rank_leaves_the_traceback_of_that_rank(tmp_path: Path) -> None:
    def job(here: int) -> None:
        failing(1, ValueError("a bug"), here)
        pretrain(NoiseImages(), tmp_path / "run", tiny())

    ended = together(2, tmp_path / "logs", job)
    assert complaints(ended) == ["stopmim: error: internal error: a bug"]
    assert [rank.code for rank in ended] == [1, 1]
    assert [path.name for path in (tmp_path / "run").glob("crash*")] == ["crash-rank1.txt"]


def test_ranks_that_disagree_stop_before_the_first_update(tmp_path: Path) -> None:
    def config(here: int) -> None:
        pretrain(NoiseImages(), tmp_path / "run", tiny(optim={"lr": 0.001 * (1 + here)}))

    def data(here: int) -> None:
        pretrain(NoiseImages(40 + 8 * here), tmp_path / "run", tiny())

    for job, what in ((config, "optim.lr: 0.002, rank 0 has 0.001"), (data, "data: 'noise-48'")):
        ended = together(2, tmp_path / "logs", job)
        assert [rank.code for rank in ended] == [2, 2]
        (line,) = complaints(ended)
        assert f"rank 1 has another {what}" in line
        assert not (tmp_path / "run").exists()


def test_a_rank_without_git_agrees_and_one_with_other_code_does_not(tmp_path: Path) -> None:
    def job(states: Sequence[str | None], here: int) -> None:
        distributed.git_state = lambda: states[here]  # type: ignore[assignment, attr-defined]
        pretrain(NoiseImages(), tmp_path / "run", tiny(), stop_at=1)

    for states, code in (([None, "a"], 0), (["a", None], 0), (["a", "a+"], 2)):
        ended = together(2, tmp_path / "logs", functools.partial(job, states))
        assert [rank.code for rank in ended] == [code, code], ended
    assert "rank 1 has another git state: 'a+', rank 0 has 'a'" in complaints(ended)[0]


def test_what_every_rank_finds_wrong_is_said_however_late_the_first_one_is(tmp_path: Path) -> None:
    fine = ["pretrain", "scenes:64:48", "--preset", "tiny_cpu", "--out", str(tmp_path / "run")]

    def job(words: list[str], env: dict[str, str], here: int) -> None:
        os.environ |= env
        time.sleep(0.3 * (1 - here))
        os._exit(main(words))

    for words, env, what in (
        (["pretrian"], {}, 'no command "pretrian"; did you mean "pretrain"?'),
        ([*fine, "--optim.lrr", "1"], {}, "optim.lrr"),
        (["pretrain", "nowhere", *fine[2:]], {}, "nowhere: no such folder or file"),
        (
            fine,
            {"STOPMIM_TIMEOUT": "5 s"},
            "STOPMIM_TIMEOUT: expected seconds, like 600, got '5 s'",
        ),
    ):
        ended = launched(2, tmp_path / "logs", functools.partial(job, words, env))
        (line,) = complaints(ended)
        assert what in line
        code = 3 if "nowhere" in words else 2
        assert code in {rank.code for rank in ended} <= {code, -signal.SIGTERM}, what


def test_no_rank_goes_on_before_all_are_connected(tmp_path: Path) -> None:
    def job(here: int) -> None:
        real = dist.init_process_group

        def connect(*args: Any, **options: Any) -> None:
            real(*args, **options)
            time.sleep(0.5 * here)
            (tmp_path / f"{here} connected").touch()

        dist.init_process_group = connect
        with joined():
            assert (tmp_path / "1 connected").exists()

    assert [rank.code for rank in together(2, tmp_path / "logs", job)] == [0, 0]


def test_a_world_that_cannot_be_joined_is_never_trained_alone(tmp_path: Path) -> None:
    def job(_: int) -> None:
        pretrain(NoiseImages(), tmp_path / "run", tiny())

    second = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1", "STOPMIM_TIMEOUT": "1"}
    first = {"WORLD_SIZE": "2", "STOPMIM_TIMEOUT": "1"}
    wrong = {"rank 0 of 2": first, "rank 1 of 2": second, "rank 0 of 1": {"MASTER_PORT": "x"}}
    started = {what: start(1, tmp_path / what, job, env) for what, env in wrong.items()}
    for what, processes in started.items():
        (ended,) = finish(processes, tmp_path / what)
        assert ended.code == 7
        assert f"{what} cannot join the others at" in ended.said
    assert not (tmp_path / "run").exists()


def test_half_an_environment_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="RANK is not set") as caught:
        pretrain(NoiseImages(), tmp_path / "run", tiny())
    assert caught.value.exit_code == 7
    assert not (tmp_path / "run").exists()


def test_restarts_that_torchrun_gets_wrong_are_refused(tmp_path: Path) -> None:
    env = {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    (ended,) = together(1, tmp_path, lambda _: pretrain(NoiseImages(), tmp_path, tiny()), env)
    assert ended.code == 2
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in ended.said


def test_a_signal_to_one_rank_stops_all_at_the_same_step(tmp_path: Path) -> None:
    config = tiny(runtime={"log_every": 4})

    def job(here: int) -> None:
        only_on(1, "step.end@2:term")(here)
        pretrain(NoiseImages(), tmp_path / "run", config)

    ended = together(2, tmp_path / "logs", job)
    assert [rank.code for rank in ended] == [143, 143]
    (line,) = complaints(ended)
    assert "saved at step 3" in line  # where they next meet: a checkpoint is due
    assert Run(tmp_path / "run").checkpoint.name == "step-00000003"
    undisturbed = train_on(2, tmp_path / "undisturbed", config)
    assert_same_run(train_on(2, tmp_path / "run", config), undisturbed)


def test_a_rank_that_is_killed_is_named_and_the_rest_leaves(tmp_path: Path) -> None:
    def job(here: int) -> None:
        only_on(1, "step.end@4:kill")(here)
        pretrain(NoiseImages(), tmp_path / "run", tiny(optim={"batch_size": 12}))

    ended = together(3, tmp_path / "logs", job)
    assert ended[1].code == -signal.SIGKILL
    assert ended[0].code == ended[2].code == 7
    (line,) = complaints(ended)
    assert "rank 1 of 3 does not answer" in line


def test_a_loss_that_is_not_finite_on_one_rank_stops_all_before_the_update(
    tmp_path: Path,
) -> None:
    def job(here: int) -> None:
        real, calls = masked_loss, 0

        def compare(*args: Any) -> Loss:
            nonlocal calls
            calls += 1
            out = real(*args)
            return out._replace(loss=out.loss * float("nan")) if here and calls == 3 else out

        update.__dict__["masked_loss"] = compare
        pretrain(NoiseImages(), tmp_path / "run", tiny())

    ended = together(2, tmp_path / "logs", job)
    assert [rank.code for rank in ended] == [6, 6]
    (line,) = complaints(ended)
    assert "not finite at step 3" in line


@pytest.mark.slow
def test_broken_images_of_every_rank_reach_the_list(tmp_path: Path) -> None:
    broken = (3, 17, 22)
    config = tiny(data={"max_bad": 0.1}, runtime={"log_every": 5})
    ended = together(
        2, tmp_path / "logs", lambda _: pretrain(NoiseImages(broken=broken), tmp_path / "b", config)
    )
    assert [rank.code for rank in ended] == [0, 0]
    alone = pretrain(NoiseImages(broken=broken), tmp_path / "a", config)
    names = [sorted(map(str, read_jsonl(tmp_path / x / "bad_files.jsonl"))) for x in "ab"]
    assert names[0] == names[1]
    assert len(names[0]) == 3
    assert_close(Run(tmp_path / "b"), alone)


@pytest.mark.slow
@pytest.mark.parametrize("silent", [0, 1])  # rank 0 hosts the store that ranks fail by
def test_a_silent_rank_ends_the_run_after_the_timeout(tmp_path: Path, silent: int) -> None:
    def job(here: int) -> None:
        if here == silent:
            real = masked_loss

            def compare(*args: Any) -> Loss:
                os.kill(os.getpid(), signal.SIGSTOP)
                return real(*args)

            update.__dict__["masked_loss"] = compare
        pretrain(NoiseImages(), tmp_path / "run", tiny())

    processes = start(2, tmp_path, job, {"STOPMIM_TIMEOUT": "3"})
    begin = time.monotonic()
    processes[1 - silent].join(30)
    assert 3 < time.monotonic() - begin < 15
    ended = finish(processes, tmp_path, 0)
    assert ended[1 - silent].code == 7, ended[1 - silent].said
    assert f"rank {silent} of 2 does not answer" in ended[1 - silent].said


# ------------------------------------------------------------------- kills and restarts


SAVING = ["save.begin", "save.model", "save.synced", "save.renamed", "save.pruned"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_of_which_one_is_killed_anywhere_end_bit_identical(tmp_path: Path) -> None:
    undisturbed = train_on(2, tmp_path / "undisturbed", tiny())
    points = [(rank, f"step.end@{i}") for rank in (0, 1) for i in (1, 4, 9)]
    for rank, point in [*points, *((0, f"{name}@1") for name in SAVING)]:
        out = tmp_path / f"{point}-{rank}"

        def job(here: int, rank: int = rank, point: str = point, out: Path = out) -> None:
            only_on(rank, f"{point}:kill")(here)
            pretrain(NoiseImages(), out, tiny())

        ended = together(2, tmp_path / "logs", job)
        assert ended[rank].code == -signal.SIGKILL, point
        assert ended[1 - rank].code == 7, point
        assert_same_run(train_on(2, out, tiny()), undisturbed)
        assert not list((out / "checkpoints").glob(".tmp*")), point


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_four_ranks_that_resume_end_bit_identical(tmp_path: Path, kind: str) -> None:
    config = tiny(runtime={"parallel": kind})
    undisturbed = train_on(4, tmp_path / "undisturbed", config)
    train_on(4, tmp_path / "run", config, stop_at=4)
    assert_same_run(train_on(4, tmp_path / "run", config), undisturbed)


def train_here(out: Path, _: int) -> None:
    pretrain(NoiseImages(), out, tiny())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_signal_at_any_time_to_any_rank_loses_nothing(tmp_path: Path) -> None:
    undisturbed = train_on(2, tmp_path / "undisturbed", tiny())
    for i in range(10):
        out = tmp_path / str(i)
        processes = start(2, out, functools.partial(train_here, out), {})
        until = time.monotonic() + 30
        while time.monotonic() < until and len(Run(out).metrics) < 1 + i % 5:
            time.sleep(0.01)
        pid = processes[i % 2].pid
        assert pid
        os.kill(pid, signal.SIGTERM)
        ended = finish(processes, out)
        assert [rank.code for rank in ended] == [143, 143], ended
        step = len(Run(out).metrics)
        assert Run(out).checkpoint.name == f"step-{step:08d}"  # nothing after it was computed
        assert_same_run(train_on(2, out, tiny()), undisturbed)


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def torchrun(out: Path, *options: str) -> list[str]:
    """A run of 32 updates, as a user types it."""
    keys = {
        "arch": "vit_micro4",
        "image_size": "24",
        "predictor.width": "24",
        "predictor.depth": "1",
        "masking.target_scale": "[0.15, 0.2]",
        "masking.context_length": "null",
        "optim.epochs": "4",
        "optim.warmup_epochs": "1",
        "optim.batch_size": "8",
        "runtime.log_every": "1",
        "runtime.save_every": "5",
        "runtime.device": "cpu",
    }
    words = ["pretrain", "scenes:64:24", "--preset", "tiny_cpu", "--out", str(out)]
    words += [word for key, value in keys.items() for word in (f"--{key}", value)]
    return [*TORCHRUN, *options, "-m", "stopmim", *words]


def ranks_of(parent: int) -> list[int]:
    """The processes that torchrun started."""
    return [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/stat")
        if path.read_text().rpartition(")")[2].split()[1] == str(parent)
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_torchrun_restarts_a_killed_rank_and_the_log_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(torchrun(tmp_path / "whole"), check=True, capture_output=True)
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    for i in range(3):
        out = tmp_path / str(i)
        command = torchrun(out, "--max-restarts=3")
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            wait_for(out, 4 + 7 * i)
            os.kill(sorted(ranks_of(process.pid))[i % 2], signal.SIGKILL)
            _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said
        assert len(Run(out).about["starts"]) == 2, said  # one restart, not several
        assert_same_run(Run(out), Run(tmp_path / "whole"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_signal_to_torchrun_saves_and_the_same_command_goes_on(tmp_path: Path) -> None:
    subprocess.run(torchrun(tmp_path / "whole"), check=True, capture_output=True)
    out = tmp_path / "run"
    with subprocess.Popen(torchrun(out), stderr=subprocess.PIPE, text=True) as process:
        wait_for(out, 7)
        process.terminate()
        _, said = process.communicate(timeout=60)
    assert process.returncode  # torchrun's own: it does not pass on ours
    assert said.count("stopped and saved at step") == 1
    assert Run(out).checkpoint.name == f"step-{len(Run(out).metrics):08d}"
    subprocess.run(torchrun(out), check=True, capture_output=True)
    assert_same_run(Run(out), Run(tmp_path / "whole"))


def wait_for(out: Path, lines: int) -> None:
    until = time.monotonic() + 60
    while len(Run(out).metrics) < lines:
        assert time.monotonic() < until, "the run did not begin"
        time.sleep(0.02)
