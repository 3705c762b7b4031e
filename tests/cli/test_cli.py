"""The command line as a person meets it: one line per mistake, and the right exit code."""

import ast
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stopmim
from hostile_weights import write_fine
from limits import limit_memory
from stopmim.base.console import Ticker, say
from stopmim.base.errors import UserError
from stopmim.cli import main
from stopmim.cli.options import split_changes
from stopmim.config.presets import PRESETS
from tiny import tiny, write_folder

TINY = [
    *("--preset", "tiny_cpu", "--arch", "vit_micro4", "--image-size", "24"),
    *("--masking.context-length", "10", "--predictor.depth", "1", "--predictor.width", "24"),
    *("--optim.epochs", "2", "--optim.batch_size", "8"),
    *("--optim.warmup-epochs", "1", "--runtime.threads", "1", "--runtime.workers", "0"),
    *("--runtime.log-every", "1", "--runtime.device", "cpu"),
]
COMMANDS = ["", "demo", "pretrain", "repair", "ablate", "check", "pack", "eval", "doctor"]
COMMANDS += ["analyse", "report", "features", "inspect", "export", "bench", "presets"]


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("pretain x", 2, 'error: no command "pretain"; did you mean "pretrain"? there are demo'),
        ("eval runs/x", 2, 'error: eval: no command "runs/x"; there are knn, linear'),
        ("eval --data x", 2, 'error: eval: no command "--data"; there are knn, linear'),
        ("eval", 2, "error: eval: a command is missing; there are knn, linear"),
        ("pretrain", 2, "error: pretrain: missing DATA (a folder, tar shards"),
        (
            "features x",
            2,
            "features: missing --encoder FILE (anything that `stopmim inspect` recognises",
        ),
        ("features x", 2, "), --out FILE (.npz, .csv or .parquet); see stopmim features --help"),
        ("check x --limit two", 2, "error: --limit: expected a whole number, got 'two'; see"),
        ("eval finetune x --lr y", 2, "error: --lr: expected a number, got 'y'; see stopmim eval"),
        ("eval knn x --hold-out", 2, "error: --hold-out: a value is missing; see stopmim eval knn"),
        ("pretrain x --outt y", 2, 'pretrain: no option --outt; did you mean "--out"? see'),
        (
            "pretrain x --batch-size 8",
            2,
            'no option --batch-size; did you mean "--optim.batch_size"?',
        ),
        ("eval knn x --batch-size 8", 2, "no option --batch-size; see stopmim eval knn --help"),
        ("pretrain x tiny_cpu", 2, 'too many: "tiny_cpu"; see stopmim pretrain --help'),
        ("export x --to tim --out y", 2, "see stopmim export --help"),
        (
            "eval lowshot random:vit_micro8@24 --data scenes:16:24 --per-class 0",
            2,
            "--per-class 0: expected 1 or more",
        ),
        ("eval lowshot random:vit_micro8@24 --data scenes:16:24 --list {tmp}/empty", 3, "Is a dir"),
        ("ablate positions --few 0", 2, "--few 0: neither a number"),
        (f"ablate positions --few {'9' * 5000}", 2, "neither a number"),
        ("ablate tracking --video-size 0 --dry-run", 2, "--video-size 0: expected 1 or more"),
        ("ablate positons", 2, 'no such table; did you mean "positions"? there are positions'),
        (
            "demo --out {tmp}/run --optim.epochs x",
            2,
            "optim.epochs: input should be a valid integer",
        ),
        ("inspect {tmp}/file", 4, "not a file of weights"),
        ("inspect {tmp}/features.npz", 4, "an archive without weights"),
        ("inspect {tmp}/run", 4, "run: no such file or folder; give a run or a file of weights"),
        ("pretrain scenes:16:24", 2, "pretrain: --out is missing"),
        ("pretrain x --out y --slurm 1x1", 2, "pretrain: --slurm needs --preset: the choice"),
        ("pretrain x --out y --preset nope", 2, "nope: no such preset or file; presets are"),
        ("pretrain x --out y --preset tiny_cpuu", 2, 'did you mean "tiny_cpu"? `stopmim presets`'),
        ("pretrain x --out y --preset my.yaml", 2, "my.yaml: no such file; `stopmim presets`"),
        ("report {tmp}/run", 4, "run: not a run directory: no such folder"),
        ("report {tmp}/empty", 4, "not a run directory: there is no run.json in it"),
        ("presets nothing", 2, "nothing: no such preset; presets are photos_s16, photos_b16"),
        ("pretrain x --sigma 1 --out y", 2, 'no option --sigma; did you mean "--positions.sigma"?'),
        (
            "pretrain x --optim.ema 0.99 --out y",
            2,
            "--optim.ema 0.99: expected two values, such as",
        ),
        (
            "pretrain x --out y --optim.ema 0.99",
            2,
            "--optim.ema 0.99: expected two values, such as",
        ),
        ("pretrain x --optim.lr --out y", 2, "--optim.lr: a value is missing"),
        ("pretrain {tmp}/a.JPG --out y", 3, "a.JPG: not a source of images; give the folder that"),
        ("check {tmp}/*.png", 3, "*.png: not a source of images; give the folder that the images"),
        ("inspect {tmp}/onnx", 4, "onnx: ONNX is written and not read by stopmim; give what it"),
        ("inspect {tmp}/onnx/model.onnx", 4, "model.onnx: ONNX is written and not read by stopmim"),
        ("doctor {tmp}/run", 4, "run: not a run directory: no such folder"),
        ("pretrain x --out {tmp}/run --positions.sgima 1", 2, 'did you mean "positions.sigma"?'),
        (
            "pretrain x --out {tmp}/run --positions.sigma -1",
            2,
            "sigma: input should be greater",
        ),
        ("pretrain x --positions.sigma", 2, "--positions.sigma: a value is missing"),
        (
            "pretrain x --out {tmp}/run --optim.ema 0.9 1.2",
            2,
            "optim.ema.1: input should be less",
        ),
        (
            "pretrain x --out {tmp}/run --seed one",
            2,
            "seed: input should be a valid integer",
        ),
        ("pretrain x --out {tmp}/run", 3, "no such folder"),
        ("pretrain {tmp}/empty --out {tmp}/run", 3, "no images"),
        (
            "pretrain {tmp}/empty --out {tmp}/run --preset continue_b16",
            2,
            "needs an encoder to start from, --init: stopmim pretrain my_images --preset continue_",
        ),
        ("pretrain x --preset continue_b16 --slurm 1x1 --out {tmp}/run", 2, "an encoder to start"),
        ("pretrain scenes:0 --out {tmp}/run", 2, "expected scenes[:count"),
        ("pretrain scenes:x:y --out {tmp}/run", 2, "expected scenes[:count"),
        ("pretrain scenes:8:24:x --out {tmp}/run", 2, "expected scenes[:count"),
        (f"pretrain scenes:8:24:{'9' * 5000} --out {{tmp}}/run", 2, "expected scenes[:count"),
        ("eval knn random:vit_micro8@24 --seed -1", 2, "--seed -1: expected 0 or more"),
        ("pretrain scenes:16:24 --out {tmp}/file", 5, "file: cannot write here"),
        ("pretrain scenes:16:24 --out {tmp}/run --preset tiny_cpu", 3, "do not fill one batch"),
        (
            "pretrain scenes:16:24 --out {tmp}/run --preset photos_cpu --optim.batch_size 500 "
            "--runtime.device cpu",
            3,
            "16 images do not fill one batch of 500",
        ),
        ("pretrain scenes:16:24 --out {tmp}/run --runtime.device cuda --preset tiny_cpu", 2, "GPU"),
        ("presets --seed 1", 2, "presets: takes no config key"),
        (
            "presets tiny_cpuu",
            2,
            'no such preset; did you mean "tiny_cpu"? `stopmim presets` lists them all',
        ),
        ("bench speed", 2, 'bench: no command "speed"; there are step, account, masks'),
        ("bench step --masks owm", 2, """--masks: invalid choice 'owm'; did you mean "own"?"""),
        (
            "bench",
            2,
            "bench: a command is missing; there are step, account, masks, growth, kernels",
        ),
        ("bench step --profil", 2, 'did you mean "--profile"? see stopmim bench step --help'),
        ("analyse", 2, "analyse: missing FIGURE, one of noise, similarity"),
        ("analyse neighbors", 2, """'neighbors'; did you mean "neighbours"? there are noise"""),
        ("pretrain x --out {tmp}/run --masking.kind multiblok", 2, 'mean "multiblock"?'),
        ("bench masks --rounds 0", 2, "--rounds 0: expected 1 or more"),
        ("bench growth --preset tiny_cpu", 2, "bench growth: no option --preset"),
        ("bench loader --optim.batch_size 4", 2, "bench loader: takes no config key"),
        ("bench loader --rate 0", 2, "--rate 0: expected images per second, above 0"),
        ("bench step --rate 10", 2, "bench step: no option --rate"),
        ("bench account --profile", 2, "bench account: no option --profile"),
        ("bench probe --rounds 3", 2, "bench probe: no option --rounds"),
        ("bench step --out {tmp}/file", 5, "file: cannot write here: File exists"),
    ],
)
def test_a_mistake_is_one_line_with_its_exit_code(
    line: str, code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "a.JPG").write_bytes(b"?")
    (tmp_path / "onnx").mkdir()
    (tmp_path / "onnx" / "model.onnx").write_bytes(b"?")
    np.savez(tmp_path / "features.npz", features=np.zeros((2, 3)))
    assert main(line.format(tmp=tmp_path).split()) == code
    err = capsys.readouterr().err
    assert said in err
    assert err.startswith("stopmim: error: ")
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "run").exists()  # nothing is left behind
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    "value", ["\u00b2", "9" * 5000, "x", ""], ids=["superscript", "digits", "x", ""]
)
def test_a_terminal_may_claim_any_width(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", value)
    monkeypatch.setenv("LINES", value)
    words = ["eval", "knn", "random:vit_micro8@16", "--data", "scenes:20:16"]
    assert main([*words, "--random-inits", "0"]) == 0


@pytest.mark.parametrize(
    ("variable", "value"),
    [("STOPMIM_MAX_PIXELS", "x"), ("STOPMIM_MAX_PIXELS", "inf"), ("STOPMIM_MAX_BYTES", "-1")],
)
def test_a_limit_that_is_no_number_is_one_line(variable: str, value: str) -> None:
    command = [sys.executable, "-m", "stopmim", "check", "scenes:10:16"]
    env = os.environ | {variable: value}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"stopmim: error: {variable}: expected ")


@pytest.mark.parametrize("name", PRESETS)
def test_a_dry_run_of_every_preset_prints_config_and_size(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pretrain", "anything", "--preset", name, "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "M parameters" in text.splitlines()[0]
    assert "\noptim:\n" in text


def test_a_dry_run_is_a_preset_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["pretrain", "x", "--preset", "vit_h14_stop", "--seed", "5", "--dry-run"])
    first = capsys.readouterr().out
    (tmp_path / "my.yaml").write_text(first)
    main(["pretrain", "x", "--preset", str(tmp_path / "my.yaml"), "--dry-run"])
    assert capsys.readouterr().out == first
    assert "seed: 5" in first


def test_config_keys_may_stand_anywhere_in_any_spelling() -> None:
    words = "pretrain --optim.ema 0.9 1 D --image-size=48 --masking.target_scale [0.1,0.2] --out x"
    words += " --optim.betas=[0.9,0.99] --seed=3"
    rest, changes = split_changes(words.split())
    assert rest == ["pretrain", "D", "--out", "x"]
    assert changes == {
        "optim.ema": [0.9, 1],
        "image_size": 48,
        "masking.target_scale": [0.1, 0.2],
        "optim.betas": [0.9, 0.99],
        "seed": 3,
    }


def test_a_pair_that_may_be_null_takes_two_values_as_others_do() -> None:
    words = "pretrain --data.crop_pixels 96 384 D --data.low [0,1] --positions.levels [1,2]"
    assert split_changes(words.split()) == (
        ["pretrain", "D"],
        {"data.crop_pixels": [96, 384], "data.low": [0, 1], "positions.levels": [1, 2]},
    )
    for rest in (["D"], ["--out", "x"]):
        words = f"pretrain --data.crop_pixels null {' '.join(rest)}"
        assert split_changes(words.split()) == (["pretrain", *rest], {"data.crop_pixels": None})
    with pytest.raises(UserError, match=r"two values, such as --data\.crop_pixels 96 96"):
        split_changes(["pretrain", "--data.crop_pixels", "96"])


@pytest.mark.parametrize("text", ["runs/first #2", "2024", "a: b.jsonl", "@x", '"q"', "[x", "~"])
def test_a_key_that_is_text_is_taken_as_typed(text: str) -> None:
    for key in ("init", "data.skip", "arch"):
        assert split_changes(["pretrain", f"--{key}", text])[1] == {key: text}
        assert split_changes(["pretrain", f"--{key}={text}", "D"]) == (
            ["pretrain", "D"],
            {key: text},
        )
    assert split_changes(["--init", "null"])[1] == {"init": None}
    assert split_changes(["--seed", "2024"])[1] == {"seed": 2024}


def test_a_path_with_the_name_of_an_emoji_is_printed_as_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = "/data/a:x:b [bold]c"
    say(path)
    assert capsys.readouterr().err == f"{path}\n"
    ticker = Ticker(path, 1)
    ticker.update(1, path)
    assert ticker.rendered().plain.count(path) == 2


def test_pretrain_trains_and_says_where_the_checkpoint_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder(tmp_path / "images")
    (folder / "part0" / "broken\x1b[31m.png").write_bytes(b"not an image")
    command = [
        "pretrain",
        str(folder),
        "--out",
        str(tmp_path / "run"),
        *TINY,
        "--data.max_bad",
        "1",
    ]
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert out.strip().endswith("checkpoints/step-00000010")
    assert err.startswith("41 images, ViT-Micro/4 at 24 px (tiny_cpu), 10 updates on CPU\n")
    assert re.search(r"pretrain 10/10  100 %  0:00 left  epoch 2/2  \d+ img/s  loss \d", err)
    assert "bad_files.jsonl: 1 of 41 images were unreadable, and replaced" in err
    assert (tmp_path / "run" / "bad_files.jsonl").read_text().count("\n") == 1
    assert main(command) == 0
    again = capsys.readouterr().err
    assert again.startswith(f"{tmp_path / 'run'}: finished, all 10 updates are done\nnext:\n")
    assert err.endswith(again[again.index("next:") :])
    assert "resumes" not in again


@pytest.mark.parametrize(
    ("number", "code"),
    [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGTERM, 143)],
)
def test_a_real_signal_saves_and_ends_with_its_code(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    folder, run = write_folder(tmp_path / "images"), tmp_path / "run"
    command = [sys.executable, "-m", "stopmim", "pretrain", str(folder), "--out", str(run), *TINY]
    command += ["--optim.epochs", "2000", "--runtime.workers", "2"]
    pipes: dict[str, Any] = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, start_new_session=True, **pipes) as process:
        while not (run / "metrics.jsonl").exists() or not (run / "metrics.jsonl").read_text():
            assert process.poll() is None
            time.sleep(0.05)
        os.killpg(process.pid, number)  # as a terminal does: to the workers too
        _, err = process.communicate(timeout=60)
    assert process.returncode == code
    said = r"stopped and saved at step \d+; the same command continues"
    assert re.fullmatch(rf"{re.escape(str(run))}: {said}", err.decode().splitlines()[-1])
    assert "error" not in err.decode()
    assert "Traceback" not in err.decode()
    assert len(list((run / "checkpoints").glob("step-*"))) >= 1


def test_without_a_command_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr()
    assert main(["--help"]) == 0
    assert shown == capsys.readouterr()
    assert "pretrain" in shown.out
    assert "--version shows" in shown.out
    assert "--debug, with any command" in " ".join(shown.out.split())


def test_help_and_version_do_not_load_torch() -> None:
    code = (
        "import sys; from stopmim.cli import main\n"
        "assert main(['--version']) == 0 and main(['--help']) == 0\n"
        "assert main(['pretrain', '--help']) == 0 and main(['presets']) == 0\n"
        "assert main(['pretrain', 'x', '--outt']) == 2\n"
        "assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_preset_is_a_row_of_a_table_of_80_columns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["presets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    rows = lines[1 : lines.index("")]
    assert [row.split()[0] for row in rows] == [*PRESETS]
    assert [*PRESETS][:4] == ["photos_s16", "photos_b16", "photos_cpu", "small_images"]
    assert lines[0].split() == ["preset", "pixels", "network", "runs", "on", "GiB", "time", "for"]
    cells = ["small_images", "32-96", "ViT-S/8", "1", "GPU", "1.2", "2", "min", "50k"]
    assert rows[3].split() == cells
    measured = r"(\d+(\.\d)?|-) +(>?\d+ h|[\d.]+ min|-) +([\d.]+[kM]?|-)$"
    for row in rows:
        assert re.search(rf"\d(\+|-\d+)? +ViT-\w+/\d+ +(CPU|1 GPU|GPUs) +{measured}", row), row


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_says_its_cost_its_command_and_what_to_expect(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    preset = PRESETS[name]
    assert preset.about
    assert preset.config is preset()
    assert (preset.cost.text == "not measured") != bool(preset.cost.hours or preset.cost.minutes)
    assert main(["presets", name]) == 0
    *lines, command = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert command.endswith(preset.command)
    text = " ".join(" ".join(lines).split())
    for said in (preset.about, preset.cost.text, preset.cost.note, preset.expects, preset.notes):
        assert said in text
    words = shlex.split(preset.command)[1:]
    assert main([*words[:2], "--dry-run", *words[2:]]) == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_a_help_text_fits_into_80_columns_and_breaks_where_it_has_to(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([command, "--help"] if command else ["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("usage: ")
    assert max(map(len, lines)) <= 80


def test_the_text_of_an_option_is_one_line_since_tyro_keeps_the_breaks_of_longer_ones() -> None:
    files = (Path(stopmim.__file__).parent / "cli").glob("*.py")
    for path in (path for path in files if path.name != "evaluate.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                texts = [item for item in node.body[1:] if isinstance(item, ast.Expr)]
                for text in texts:
                    assert text.lineno == text.end_lineno, f"{path.name}:{text.lineno}"


def test_no_help_says_that_the_default_is_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """The text of an option that may be left out says what happens then."""
    for command in ("pretrain", "ablate", "check", "features", "bench step", "eval finetune"):
        assert main([*command.split(), "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "{None}" not in text
    assert "(default: )" not in text
    assert "(default: None)" not in text


def test_a_closed_pipe_is_quiet() -> None:
    command = f"{sys.executable} -m stopmim presets | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.stderr == ""


def test_a_bug_is_one_line_and_a_traceback_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise AssertionError("this cannot happen")

    monkeypatch.setattr("stopmim.train.training.build", broken)
    command = ["pretrain", "scenes:16:24", "--out", str(tmp_path / "run"), *TINY]
    assert main(command) == 1
    assert "internal error: AssertionError: this cannot happen" in capsys.readouterr().err
    assert "this cannot happen" in (tmp_path / "run" / "crash-rank0.txt").read_text()
    with pytest.raises(AssertionError):
        main([*command, "--debug"])


@pytest.mark.parametrize(
    ("batch", "accumulate", "at_a_time", "way_out"),
    [
        (8, 1, 8, "--runtime.accumulate 2"),
        (10, 2, 5, "--runtime.accumulate 5"),  # 4 parts would be refused
        (4, 4, 1, "--runtime.recompute on"),
    ],
)
def test_running_out_of_memory_names_a_way_out_that_works(
    batch: int,
    accumulate: int,
    at_a_time: int,
    way_out: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import torch

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore lines")

    monkeypatch.setattr("stopmim.train.step.Step.__call__", full)
    cut = ["--optim.batch_size", str(batch), "--runtime.accumulate", str(accumulate)]
    assert main(["pretrain", "scenes:16:24", "--out", str(tmp_path / "run"), *TINY, *cut]) == 7
    err = capsys.readouterr().err.splitlines()[-1]
    assert f"out of memory with {at_a_time} images at a time" in err
    assert err.endswith(way_out)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("pretrain scenes:2048:24 --out {run} {tiny} --optim.batch_size 2048", "accumulate 2"),
        pytest.param(
            "pretrain scenes:16:24 --out {run} --preset vit_h14_stop --optim.batch_size 4",
            "try a smaller --arch",
            marks=pytest.mark.slow,
        ),
        ("pretrain scenes:999999:99 --out {run} --preset tiny_cpu", "use fewer images"),
        ("eval knn random:vit_micro8@24 --data scenes:999999:99", "or use fewer images"),
        (
            "features scenes:999999:99 --encoder {fine} --out {run}.npz",
            "or use fewer images",
        ),
    ],
)
def test_main_memory_that_runs_out_is_one_line_with_a_way_out(
    words: str, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In a child with little more address space than it already has: real allocations fail."""
    for module in (
        "train.loop",
        "evals.suite",
        "evals.feature_files",
    ):  # or their imports would take what there is
        import_module(f"stopmim.{module}")
    write_fine(fine := tmp_path / "fine.safetensors")
    child = os.fork()
    if child == 0:
        code = 99
        try:
            limit_memory(400 * 2**20)
            names = {"run": tmp_path / "run", "fine": fine, "tiny": " ".join(TINY)}
            code = main(words.format(**names).split())
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    line = capfd.readouterr().err.splitlines()[-1]
    assert os.WEXITSTATUS(status) == 7, line
    assert re.search(r"out of memory.*: no room for [\d.,]+ \wiB more in main memory; ", line)
    assert said in line
    assert len(list(tmp_path.rglob("crash*"))) == 0


def test_a_directory_that_cannot_be_written_is_refused_before_anything_is_read(
    tmp_path: Path,
) -> None:
    """As another user: root may write anywhere."""
    (tmp_path / "locked").mkdir(mode=0o555)
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents[:3]:
        parent.chmod(parent.stat().st_mode | 0o055)
    child = os.fork()
    if child == 0:
        code = 99
        try:
            if os.getuid() == 0:
                os.setresuid(65534, 65534, 65534)
            code = main(["pretrain", "scenes:9:24", "--out", str(tmp_path / "locked/run"), *TINY])
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.WEXITSTATUS(status) == 5


@pytest.mark.parametrize(("words", "code"), [(["--version"], 0), (["pretrain"], 2)])
def test_a_rank_ends_with_its_own_code_and_words_whatever_torch_does_at_the_end(
    words: list[str], code: int
) -> None:
    fault = "import atexit, os; atexit.register(os.abort)"  # as a thread of torch now and then does
    script = f"{fault}; import sys; sys.argv[1:] = {words}; from stopmim.__main__ import run; run()"
    command, rank = [sys.executable, "-c", script], os.environ | {"RANK": "0"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=rank)
    assert done.returncode == code
    assert "stopmim" in done.stdout + done.stderr


def test_images_of_a_run_that_have_moved_can_be_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photos = write_folder(tmp_path / "photos", 8)
    run = stopmim.pretrain(photos, tmp_path / "run", tiny(), stop_at=1)
    photos.rename(tmp_path / "elsewhere")
    words = ["analyse", "masks", str(run.path)]
    assert main(words) == 3
    assert "if the images of the run have moved, give --data" in capsys.readouterr().err
    assert main([*words, "--data", str(tmp_path / "nowhere")]) == 3
    assert "have moved" not in capsys.readouterr().err
