"""Run directories as somebody could send them: forged, damaged, endless."""

import atexit
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from hostile_weights import Write, link, many_blocks, sparse
from tiny import tiny

DEEP = "[" * 100_000
DIGITS = "1" * 5000  # more than Python turns into a number


@cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="stopmim-hostile-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def preset() -> Path:
    """The config of the good run, as a file for --preset."""
    from stopmim.config.yaml_text import to_yaml

    path = _folder() / "tiny.yaml"
    path.write_text(to_yaml(tiny(**{"runtime.health_every": 2})))
    return path


@cache
def finished() -> Path:
    """A run of a second that `stopmim pretrain scenes:40:24 --preset tiny.yaml` resumes."""
    from stopmim.train.loop import pretrain

    path = _folder() / "run"
    run = pretrain("scenes:40:24", path, str(preset()), stop_at=6)
    run.add_result(name="accuracy", protocol="knn", value=50.0, unit="percent")
    return path


def forge(step: Path, **files: bytes) -> None:
    """Replaces files of a checkpoint, and makes its manifest agree."""
    manifest = json.loads((step / "manifest.json").read_bytes())
    names = {"state": "state.json", "model": "model.safetensors"}
    for short, data in files.items():
        name = names[short]
        (step / name).write_bytes(data)
        about = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
        manifest["files"][name] = about
    (step / "manifest.json").write_text(json.dumps(manifest))


def changed(change: Callable[[Path], object]) -> Write:
    """A copy of the good run on which `change` was called."""

    def write(path: Path) -> None:
        shutil.copytree(finished(), path)
        change(path)

    return write


def steps(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").glob("step-*"))


def checkpoint(change: Callable[[Path], object]) -> Write:
    """A run with one checkpoint, on which `change` was called."""

    def one(run: Path) -> None:
        *others, last = steps(run)
        for old in others:
            shutil.rmtree(old)
        change(last)

    return changed(one)


def lines(name: str, text: str | bytes) -> Write:
    """A run with `text` after the lines of one of its logs."""
    data = text if isinstance(text, bytes) else text.encode()
    return changed(lambda run: (run / name).write_bytes((run / name).read_bytes() + data))


def file(name: str, write: Write) -> Write:
    """A run whose file `name` is another."""

    def change(run: Path) -> None:
        (run / name).unlink()
        write(run / name)

    return changed(change)


def json_of(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Changes the tree in a JSON file of a folder."""

    def edit(folder: Path) -> None:
        tree = json.loads((folder / name).read_bytes())
        change(tree)
        (folder / name).write_text(json.dumps(tree))

    return edit


def state(change: Callable[[dict[str, Any]], object]) -> Write:
    """A run whose state.json is changed, with a manifest that agrees."""

    def edit(step: Path) -> None:
        tree = json.loads((step / "state.json").read_bytes())
        change(tree)
        forge(step, state=json.dumps(tree).encode())

    return checkpoint(edit)


def lists(name: str, size: object = 0, write: Write | None = None) -> Write:
    """A manifest that lists one file more."""

    def edit(step: Path) -> None:
        digest = hashlib.sha256(b"").hexdigest()
        add = json_of("manifest.json", lambda m: m["files"].update(
            {name: {"bytes": size, "sha256": digest}}))  # fmt: skip
        add(step)
        if write:
            write(step / name)

    return checkpoint(edit)


def texts(name: str) -> dict[str, Write]:
    """A JSON file that is no JSON, or no file."""
    return {
        "a pipe": os.mkfifo,
        "endless": link("/dev/zero"),
        "a terabyte": sparse(2**40),
        "a folder": lambda path: path.mkdir(),
        "nonsense": lambda path: path.write_bytes(b"\xff\xfe{"),
        "nested": lambda path: path.write_text(DEEP),
        "a list": lambda path: path.write_text("[]"),
        "a number of 5,000 digits": lambda path: path.write_text(DIGITS),
    }


def runs() -> dict[str, Write]:
    """Name to writer, for each run directory."""
    found = _checkpoints() | _states() | _run_json() | _logs()
    return {f"run with {name}": write for name, write in found.items()}


def _checkpoints() -> dict[str, Write]:
    def without(name: str) -> Write:
        return checkpoint(json_of("manifest.json", lambda m: m.pop(name)))

    def manifest(write: Write) -> Write:
        def change(step: Path) -> None:
            (step / "manifest.json").unlink()
            write(step / "manifest.json")

        return checkpoint(change)

    def weights(write: Write) -> Write:
        def change(step: Path) -> None:
            (step / "model.safetensors").unlink()
            write(step / "model.safetensors")

        return checkpoint(change)

    def holes(step: Path) -> None:
        """Weights of 64 GB that take no room, of the size that the manifest says."""
        os.truncate(step / "model.safetensors", 2**36)
        name = "model.safetensors"
        json_of("manifest.json", lambda m: m["files"][name].update(bytes=2**36))(step)

    def loop(run: Path) -> None:
        shutil.rmtree(steps(run)[-1])
        steps(run)[-1].with_name("step-00009999").symlink_to("step-00009999")

    return {
        **{f"a manifest that is {k}": manifest(w) for k, w in texts("manifest").items()},
        **{f"weights that are {k}": weights(w) for k, w in texts("model").items()},
        "a manifest without files": without("files"),
        "a manifest without format": without("format"),
        "a manifest of an unknown format": checkpoint(
            json_of("manifest.json", lambda m: m.update(format=10**9))
        ),
        "a manifest of a later format": checkpoint(
            json_of("manifest.json", lambda m: (m.update(format=99), m.pop("stopmim", None)))
        ),
        "a manifest whose format is text": checkpoint(
            json_of("manifest.json", lambda m: m.update(format="1"))
        ),
        "a manifest without sums": checkpoint(
            json_of("manifest.json", lambda m: [x.pop("sha256") for x in m["files"].values()])
        ),
        "a manifest of a million files": checkpoint(
            json_of(
                "manifest.json",
                lambda m: m["files"].update({f"f{i}": {"bytes": 0} for i in range(200_000)}),
            )
        ),
        "a manifest that lists /dev/zero": lists("/dev/zero"),
        "a manifest that lists a link to zeros": lists("zeros", 0, link("/dev/zero")),
        "a manifest that lists a pipe": lists("pipe", 0, os.mkfifo),
        "a manifest that lists a terabyte": lists("holes", 2**40, sparse(2**40)),
        "a manifest that lists a folder above": lists("../../run.json", 10**6),
        "a manifest that lists a long name": lists("n" * 300),
        "a manifest that lists lines": lists("a\nstopmim: error: forged\x1b[2J"),
        "a manifest that lists a zero byte": lists("a\0b"),
        "weights of 64 GB of holes": checkpoint(holes),
        "many blocks": checkpoint(lambda step: forge(step, model=many_blocks(15_000))),
        "a checkpoint that is a loop": changed(loop),
        "a checkpoint that is a file": changed(
            lambda run: (run / "checkpoints" / "step-00009999").write_text("x")
        ),
        "a checkpoint without a number": changed(
            lambda run: steps(run)[-1].rename(run / "checkpoints" / "step-abcdefgh")
        ),
    }


def _states() -> dict[str, Write]:
    configs: dict[str, Callable[[dict[str, Any]], object]] = {
        "300,000 blocks": lambda c: c["predictor"].update(depth=300_000),
        "10 ** 30 blocks": lambda c: c["predictor"].update(depth=10**30),
        "a predictor of a billion": lambda c: c["predictor"].update(width=4_000_000_000),
        "a billion heads": lambda c: c["predictor"].update(heads=10**9),
        "images of a million": lambda c: c.update(arch="vit_g1", image_size=1_000_000),
        "images of 4096": lambda c: c.update(arch="vit_g1", image_size=4096),
        "patches of 10 ** 60": lambda c: c.update(arch=f"vit_g{10**60}", image_size=10**60),
        "another network": lambda c: c.update(arch="vit_s4"),
        "no network": lambda c: c.update(arch="resnet50"),
        "an arch of lines": lambda c: c.update(arch="a\nstopmim: error: forged\x1b[2J"),
        "an arch of megabytes": lambda c: c.update(arch="x" * 5_000_000),
        "a start of lines": lambda c: c.update(init="a\nstopmim: error: forged\x1b[2J"),
        "a million targets": lambda c: c["masking"].update(targets=10**6),
        "a batch of a billion": lambda c: c["optim"].update(batch_size=10**9),
        "no predictor": lambda c: c.pop("predictor"),
        "a seed of 4,000 digits": lambda c: c.update(seed=10**4000),
    }
    trees: dict[str, Callable[[dict[str, Any]], object]] = {
        "no step": lambda s: s.pop("step"),
        "a step of text": lambda s: s.update(step="x"),
        "an infinite step": lambda s: s.update(step=float("inf")),
        "a step below zero": lambda s: s.update(step=-5),
        "a step of 4,000 digits": lambda s: s.update(step=10**4000),
        "a list as config": lambda s: s.update(config=[]),
        "no config": lambda s: s.pop("config"),
        "a list as scaler": lambda s: s.update(scaler=[1]),
    }

    def of(change: Callable[[dict[str, Any]], object]) -> Write:
        return state(lambda tree: change(tree["config"]))

    return (
        {f"a state with {name}": of(change) for name, change in configs.items()}
        | {f"a state with {name}": state(change) for name, change in trees.items()}
        | {
            "a state that is nested": checkpoint(lambda step: forge(step, state=DEEP.encode())),
            "a state that is a list": checkpoint(lambda step: forge(step, state=b"[]")),
            "a state of 5,000 digits": checkpoint(
                lambda step: forge(step, state=f'{{"step": {DIGITS}}}'.encode())
            ),
        }
    )


def _run_json() -> dict[str, Write]:
    trees: dict[str, Callable[[dict[str, Any]], object]] = {
        "endless images": lambda t: t["data"].update(source="list:/dev/zero"),
        "images in an endless list": lambda t: t["data"].update(source="/tmp@/dev/zero"),
        "images in a pipe": lambda t: t["data"].update(source="tar:/proc/self/fd/0"),
        "a million scenes": lambda t: t["data"].update(source="scenes:1000000:4096"),
        "scenes of 5,000 digits": lambda t: t["data"].update(source=f"scenes:{DIGITS}"),
        "a source of lines": lambda t: t["data"].update(source="x\nstopmim: error: y\x1b[2J"),
        "a source of megabytes": lambda t: t["data"].update(source="x" * 3_000_000),
        "a source that is a list": lambda t: t["data"].update(source=["scenes"]),
        "a source with a zero byte": lambda t: t["data"].update(source="a\0b"),
        "no images": lambda t: t["data"].update(images=0),
        "fewer images than a batch": lambda t: t["data"].update(images=1),
        "images below zero": lambda t: t["data"].update(images=-40),
        "10 ** 400 images": lambda t: t["data"].update(images=10**400),
        "no data": lambda t: t.pop("data"),
        "no starts": lambda t: t.update(starts=[]),
        "starts of text": lambda t: t.update(starts=["x"]),
        "100,000 threads": lambda t: t["starts"][0].update(threads=100_000),
        "no config": lambda t: t.pop("config"),
        "a config of lists": lambda t: t.update(config=[[]]),
        "300,000 blocks": lambda t: t["config"]["predictor"].update(depth=300_000),
        "images of a million": lambda t: t["config"].update(arch="vit_g1", image_size=10**6),
        "an endless list to skip": lambda t: t["config"]["data"].update(skip="/dev/zero.jsonl"),
        "an endless start": lambda t: t["config"].update(init="/dev/zero"),
    }
    found = {name: changed(json_of("run.json", change)) for name, change in trees.items()}
    found |= {f"a run.json that is {k}": file("run.json", w) for k, w in texts("run").items()}
    return found


def _logs() -> dict[str, Write]:
    bad: dict[str, str | bytes] = {
        "nested lines": DEEP + "\n",
        "lines of 5,000 digits": f'{{"step": {DIGITS}}}\n',
        "infinite lines": '{"step": Infinity, "loss": NaN, "epoch": 1e400}\n',
        "lines of text": '{"step": "x", "loss": [], "target_rank": {}}\n',
        "lines without a step": '{"loss": 1.0}\n{"random_init": 3}\n',
        "lines below zero": '{"step": -1, "loss": -1, "images_per_s": -0.0}\n',
        "lines of 10 ** 400": '{"step": 1' + "0" * 400 + ', "value": 1' + "0" * 400 + "}\n",
        "a long line": '{"step": 7, "name": "' + "x" * 20_000_000 + '"}\n',
        "lines of zero bytes": b"\0" * 1_000_000 + b"\n",
        "lines with escapes": '{"step": 7, "name": "\\n\\u001b[2J\\ud800", "protocol": "\\n"}\n',
        "many lines": '{"step": 7}\n' * 300_000,
    }
    logs = ("metrics.jsonl", "results.jsonl")
    return {
        **{f"{what} in {log}": lines(log, text) for log in logs for what, text in bad.items()},
        **{
            f"{log} that is {what}": file(log, write)
            for log in logs
            for what, write in texts(log).items()
            if what not in ("nonsense", "nested", "a list", "a number of 5,000 digits")
        },
        "bad_files.jsonl that is endless": changed(
            lambda run: (run / "bad_files.jsonl").symlink_to("/dev/zero")
        ),
        "bad_files.jsonl that is a pipe": changed(lambda run: os.mkfifo(run / "bad_files.jsonl")),
    }
