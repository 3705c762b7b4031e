"""A checkpoint is whole and what was saved, or it is refused: never something in between."""

import hashlib
import json
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stopmim import Run, load_encoder, load_model, pretrain
from stopmim.base.errors import CheckpointError
from stopmim.method.build import build
from stopmim.runs import checkpoint
from stopmim.runs.saver import Saver
from stopmim.train.optimizer import adamw
from tiny import NoiseImages, tiny


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return pretrain(NoiseImages(), tmp_path_factory.mktemp("run"), tiny(), stop_at=4)


@pytest.fixture
def copy(run: Run, tmp_path: Path) -> Run:
    shutil.copytree(run.path, tmp_path / "copy")
    return Run(tmp_path / "copy")


def test_a_checkpoint_holds_three_files_and_their_sums(run: Run) -> None:
    files = {path.name for path in run.checkpoint.iterdir()}
    assert files == {"model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"}
    manifest = json.loads((run.checkpoint / "manifest.json").read_text())
    assert manifest["files"].keys() == files - {"manifest.json"}
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in run.checkpoint.iterdir())


def test_released_names_and_shapes_are_in_the_file(run: Run) -> None:
    weights = load_file(run.checkpoint / "model.safetensors")
    assert weights["predictor.predictor_pos_embed"].shape == (1, 36, 24)
    assert weights["predictor.mask_token"].shape == (1, 1, 24)
    assert weights["target_encoder.pos_embed"].shape == (1, 36, 96)


def test_no_damage_goes_unnoticed(copy: Run) -> None:
    """A flipped bit, a cut, an empty or a missing file: refused, and the one before is used."""
    rng = random.Random(0)
    newest = copy.checkpoint
    before = sorted((copy.path / "checkpoints").iterdir())[0]
    originals = {path: path.read_bytes() for path in newest.iterdir()}
    for i in range(120):
        path = rng.choice([*originals])
        data = bytearray(originals[path])
        match i % 4:
            case 0 | 1:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                path.write_bytes(data)
            case 2:
                path.write_bytes(data[: rng.randrange(len(data))])
            case _:
                path.unlink()
        found, damaged = checkpoint.latest(copy.path)
        if found == newest:  # a bit of the manifest that says nothing about the files
            assert path.name == "manifest.json"
            assert i % 4 in (0, 1)
        else:
            assert found == before
            assert len(damaged) == 1
        path.write_bytes(originals[path])
    assert copy.checkpoint == newest


def test_a_sparse_file_is_damage_that_costs_no_time(copy: Run) -> None:
    """An archive of kilobytes may hold it, and the manifest beside it may confirm anything."""
    newest = copy.checkpoint
    for name in ("model.safetensors", "state.json"):
        size = 2**36
        os.truncate(newest / name, size)
        manifest = json.loads((newest / "manifest.json").read_text())
        manifest["files"][name]["bytes"] = size
        (newest / "manifest.json").write_text(json.dumps(manifest))
        begin = time.process_time()
        assert "a sparse file: 6871" in str(checkpoint.verify(newest))
        assert time.process_time() - begin < 1


def test_latest_is_by_step_and_not_by_date(copy: Run) -> None:
    first, second = sorted((copy.path / "checkpoints").iterdir())
    os.utime(first, (2e9, 2e9))
    assert copy.checkpoint == second
    assert Run(str(copy.path)) == copy
    assert Run(str(copy.path)).checkpoint == second


def test_damaged_checkpoints_of_later_steps_do_not_take_the_place_of_good_ones(copy: Run) -> None:
    """A run that passed over them saves, and again: what it saved is there."""
    folder = copy.path / "checkpoints"
    good, _ = sorted(folder.iterdir())
    for step in (20, 30):
        broken = shutil.copytree(good, folder / f"step-{step:08d}")
        (broken / "state.json").write_text("{}")
    model = build(copy.config)
    optimizer = adamw(model, copy.config.optim)
    assert copy.config.runtime.keep == 2
    saver = Saver(copy.path, model, optimizer, None, copy.config)
    for step in (11, 12):
        saver.save(step, final=True)
        assert checkpoint.latest(copy.path)[0] == folder / f"step-{step:08d}"
    names = sorted(path.name for path in folder.iterdir())
    assert names == [f"step-{step:08d}" for step in (11, 12, 20, 30)]


def test_a_checkpoint_of_a_later_format_asks_for_an_upgrade(copy: Run) -> None:
    manifest = json.loads((copy.checkpoint / "manifest.json").read_text())
    (copy.checkpoint / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(CheckpointError, match=r"format 99, made by stopmim .*: upgrade stopmim"):
        load_model(copy.checkpoint)


def test_a_checkpoint_of_another_model_is_refused_with_the_shapes(run: Run) -> None:
    from stopmim.method.build import configure

    other = build(configure(tiny(predictor={"width": 48})))
    with pytest.raises(
        CheckpointError, match=r"mask_token is \(1, 1, 24\), the model has"
    ) as caught:
        checkpoint.load(run.checkpoint, other)
    assert caught.value.exit_code == 4
    untied = build(configure(tiny(positions={"covariance": "untied"})))
    with pytest.raises(CheckpointError, match=r"missing predictor.noise_embed.weight \(24, 96\)"):
        checkpoint.load(run.checkpoint, untied)


def test_what_is_loaded_is_what_was_trained(run: Run) -> None:
    weights = load_file(run.checkpoint / "model.safetensors")
    model = load_model(run.path)
    for name, x in model.state_dict().items():
        assert torch.equal(x, weights[name]), name
    assert not model.training
    images = torch.randn(2, 3, 24, 24)
    for branch, encoder in (("target", model.branch()), ("context", model.encoder)):
        loaded = load_encoder(run.path, branch)  # type: ignore[arg-type]
        torch.testing.assert_close(loaded(images), encoder(images))
    assert not torch.equal(load_encoder(run.path, "context")(images), run.encoder()(images))


def test_extra_weights_in_a_file_are_refused(copy: Run) -> None:
    path = copy.checkpoint
    weights = load_file(path / "model.safetensors")
    save_file(weights | {"extra": torch.zeros(1)}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"unexpected extra \(1,\)"):
        checkpoint.load(path, build(copy.config))


# What a received checkpoint may hold, with a manifest that confirms it: A is the matrix of the
# predictor, of 24 times 96.
A = "predictor.predictor_embed.weight"
HUGE = torch.full((24, 96), 1e300, dtype=torch.float64)
SLOTS = {
    "one value": ("exp_avg", torch.zeros(1), r"float32 \(1,\), .*float32 \(24, 96\)"),
    "no value": ("exp_avg_sq", torch.zeros(0), r"float32 \(0,\), .*float32 \(24, 96\)"),
    "three values": ("exp_avg", torch.zeros(3), r"float32 \(3,\), .*float32 \(24, 96\)"),
    "too large": ("exp_avg", torch.zeros(2, 24, 96), r"float32 \(2, 24, 96\), .* \(24, 96\)"),
    "turned": ("exp_avg_sq", torch.zeros(96, 24), r"float32 \(96, 24\), .*float32 \(24, 96\)"),
    "a number": ("exp_avg", torch.tensor(0.0), r"float32 \(\), .*float32 \(24, 96\)"),
    "missing": ("exp_avg", None, r"is missing, .*float32 \(24, 96\)"),
    "nan": ("exp_avg", torch.full((24, 96), float("nan")), "not finite"),
    "negative": ("exp_avg_sq", torch.full((24, 96), -1.0), "is below 0"),
    "step of three": ("step", torch.zeros(3), r"float32 \(3,\), .*float32 \(\)"),
    "step of integers": ("step", torch.tensor(4), r"int64 \(\), .*float32 \(\)"),
    "step nan": ("step", torch.tensor(float("nan")), "not finite"),
    "step negative": ("step", torch.tensor(-1.0), "is below 0"),
} | {
    str(kind): ("exp_avg", torch.zeros(24, 96).to(kind), rf"{kind} \(24, 96\), .* torch.float32")
    for kind in (torch.bool, torch.int64, torch.complex64, torch.float8_e5m2, torch.float64)
}
KINDS = (torch.bool, torch.int64, torch.complex64, torch.float8_e5m2)
WEIGHTS = {str(kind): (torch.ones(24, 96).to(kind), f"{A} is {kind}, not float") for kind in KINDS}
WEIGHTS |= {"nan": (torch.full((24, 96), float("nan")), f"{A} has values that are not finite")}
WEIGHTS |= {"huge": (HUGE, f"{A} has values that are not finite")}


def forge(run: Run, name: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """Changes a file of the newest checkpoint, which its manifest then confirms."""
    path = run.checkpoint
    change(tensors := load_file(path / name))
    save_file(tensors, path / name)
    manifest = json.loads((path / "manifest.json").read_text())
    size = (path / name).stat().st_size
    manifest["files"][name] = {"bytes": size, "sha256": checkpoint.sha256(path / name)}
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert checkpoint.verify(path) is None
    return path


@pytest.mark.parametrize("kind", SLOTS)
def test_a_slot_that_the_optimizer_could_not_have_is_one_line(copy: Run, kind: str) -> None:
    """It would be an internal error, or memory that the optimizer does not own."""
    slot, value, said = SLOTS[kind]
    name = f"{A}/{slot}"

    def change(slots: dict[str, torch.Tensor]) -> None:
        del slots[name]
        slots |= {} if value is None else {name: value}

    path = forge(copy, "optimizer.safetensors", change)
    model = build(copy.config)
    with pytest.raises(CheckpointError, match=f"{name} .*{said}") as caught:
        checkpoint.load(path, model, adamw(model, copy.config.optim))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("kind", WEIGHTS)
def test_weights_that_no_run_saves_do_not_resume(copy: Run, kind: str) -> None:
    value, said = WEIGHTS[kind]
    path = forge(copy, "model.safetensors", lambda weights: weights.update({A: value}))
    with pytest.raises(CheckpointError, match=said):
        checkpoint.load(path, build(copy.config))


def test_slots_of_no_parameter_or_after_no_update_are_refused(copy: Run) -> None:
    name, one, model = "optimizer.safetensors", torch.tensor(1.0), build(copy.config)
    path = forge(copy, name, lambda slots: slots.update({"x/step": one}))
    with pytest.raises(CheckpointError, match="entries of another model"):
        checkpoint.load(path, model, adamw(model, copy.config.optim))
    forge(copy, name, dict.clear)
    with pytest.raises(CheckpointError, match="is empty, expected that of 4 updates"):
        pretrain(NoiseImages(), copy.path, tiny())


def test_an_optimizer_before_its_first_update_is_saved_and_loaded(copy: Run) -> None:
    model = build(copy.config)
    Saver(copy.path, model, adamw(model, copy.config.optim), None, copy.config).save(0, final=True)
    other = build(copy.config)
    optimizer = adamw(other, copy.config.optim)
    checkpoint.load(copy.path / "checkpoints" / "step-00000000", other, optimizer)
    assert not optimizer.state


@pytest.mark.parametrize("name", ["nowhere", "folder", "file"])
def test_a_path_without_a_checkpoint_is_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"\x80\x04garbage")
    with pytest.raises(CheckpointError) as caught:
        load_encoder(tmp_path / name)
    assert len(str(caught.value).splitlines()) == 1


# ------------------------------------------------------------------------------ while it trains


class Live:
    """A run that saves and prunes whenever somebody has looked at its newest checkpoint."""

    def __init__(self, run: Run, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
        self.run, self.left = run, times
        self.verify = checkpoint.verify
        monkeypatch.setattr(checkpoint, "verify", self)

    def __call__(self, path: Path) -> str | None:
        found = self.verify(path)
        newest = sorted(path.parent.glob("step-*"))[-1]
        if self.left and path == newest:
            self.left -= 1
            self.save(path, int(path.name[5:]) + 1)
            shutil.rmtree(path)
        return found

    def save(self, path: Path, step: int) -> None:
        """The checkpoint `path` once more, as that of another step."""
        new = shutil.copytree(path, path.with_name(f"step-{step:08d}"))
        state = json.dumps(json.loads((new / "state.json").read_text()) | {"step": step}).encode()
        (new / "state.json").write_bytes(state)
        manifest = json.loads((new / "manifest.json").read_text())
        sums = {"bytes": len(state), "sha256": hashlib.sha256(state).hexdigest()}
        manifest["files"]["state.json"] = sums
        (new / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("command", ["eval", "inspect", "report", "model", "doctor"])
def test_a_checkpoint_that_is_pruned_while_it_is_read_gives_way_to_the_next(
    copy: Run, monkeypatch: pytest.MonkeyPatch, command: str, times: int
) -> None:
    from stopmim.cli import main
    from stopmim.evals.inputs import open_at
    from stopmim.weights.inspect import identify

    live = Live(copy, monkeypatch, times)
    match command:
        case "eval":
            assert open_at(str(copy.path))[1] == 4 + times
        case "inspect":
            assert identify(copy.path).step == 4 + times
        case "model":
            assert copy.model() is not None
        case "doctor":
            assert main(["doctor", str(copy.path), "--data", "scenes:16:24"]) in range(14)
        case _:
            assert main(["report", str(copy.path), "--data", "scenes:16:24"]) == 0
            assert "A checkpoint" not in (copy.path / "report.html").read_text()
    assert live.left == 0


def test_a_checkpoint_that_is_pruned_after_it_was_found_gives_way_to_the_next(
    copy: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, asked = Live(copy, monkeypatch, 0), list[Path]()

    def read(path: Path) -> int:
        asked.append(path)
        if len(asked) == 1:
            live.save(path, 5)
            shutil.rmtree(path)
        return int(checkpoint.state(path)["step"])

    assert checkpoint.read_newest(copy.path, read) == 5
    assert [path.name for path in asked] == ["step-00000004", "step-00000005"]


def test_a_checkpoint_that_is_damaged_and_stays_is_still_an_error(copy: Run) -> None:
    for path in (copy.path / "checkpoints").iterdir():
        (path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="0 bytes, not"):
        copy.model()


@pytest.mark.parametrize("link", ["/dev/zero", "pipe"])
def test_a_manifest_that_names_what_never_ends_is_refused(
    copy: Run, tmp_path: Path, link: str
) -> None:
    os.mkfifo(tmp_path / "pipe")
    newest = copy.checkpoint
    manifest = json.loads((newest / "manifest.json").read_text())
    manifest["files"]["endless"] = {"bytes": 0, "sha256": ""}
    (newest / "manifest.json").write_text(json.dumps(manifest))
    (newest / "endless").symlink_to(tmp_path / link)
    assert "not a regular file" in str(checkpoint.verify(newest))
    (newest / "manifest.json").unlink()
    (newest / "manifest.json").symlink_to(tmp_path / link)
    assert "not a regular file" in str(checkpoint.verify(newest))


@pytest.mark.parametrize(
    ("manifest", "state"),
    [({"format": "x"}, None), (None, []), (None, {"step": 4}), (None, {"config": {}}), ([], None)],
    ids=str,
)
def test_manifests_and_states_that_lack_a_key_are_passed_over(
    copy: Run, manifest: object, state: object
) -> None:
    newest = copy.checkpoint
    if state is not None:
        (newest / "state.json").write_text(json.dumps(state))
    text = (newest / "state.json").read_bytes()
    tree = json.loads((newest / "manifest.json").read_text())
    sums = {"sha256": hashlib.sha256(text).hexdigest(), "bytes": len(text)}
    tree["files"]["state.json"] = sums
    if isinstance(manifest, dict):
        tree |= manifest
    (newest / "manifest.json").write_text(json.dumps(tree if manifest != [] else []))
    found, damaged = checkpoint.latest(copy.path)
    assert found is not None
    assert found.name == "step-00000003"
    assert len(damaged) == 1


def test_a_checkpoint_under_the_name_of_a_later_one_does_not_take_its_place(copy: Run) -> None:
    """Its model would be an old one, and the run would resume from it again and again."""
    folder = copy.path / "checkpoints"
    first, second = sorted(folder.iterdir())
    shutil.copytree(first, folder / "step-99999999")
    shutil.copytree(second, folder / "step-zzzzzzzz")
    shutil.copytree(second, folder / "step-\u0663\u0663\u0663\u0663\u0663\u0663\u0663\u0663")
    found, damaged = checkpoint.latest(copy.path)
    assert found == second
    assert damaged == [f"{folder / 'step-99999999'}: holds step 3"]
    assert copy.lost_lines == []


@pytest.mark.parametrize("how", ["by the same name", "by a link"])
def test_a_manifest_that_lists_a_file_twice_is_refused_before_that_is_hashed(
    copy: Run, how: str
) -> None:
    """A thousand times over it would take hours."""
    newest = copy.checkpoint
    manifest = json.loads((newest / "manifest.json").read_text())
    name = "x/model.safetensors" if how == "by the same name" else "x.safetensors"
    (newest / "x.safetensors").hardlink_to(newest / "model.safetensors")
    manifest["files"][name] = manifest["files"]["model.safetensors"]
    (newest / "manifest.json").write_text(json.dumps(manifest))
    assert "the same file as another one" in str(checkpoint.verify(newest))
