"""What surrounds a command: streams, limits, variables, caches, names, links, kills of others."""

import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from campaign.cases import DOCUMENTED, VERDICTS, Case, Family, need
from campaign.damage import ABSURD, BYTES
from campaign.processes import USUAL
from campaign.run_files import perform, prepare
from campaign.sample import copy, same_model, words
from stopmim.base.files import count_lines, parse_jsonl
from stopmim.runs.identity import sealed

READERS = ("doctor", "report", "inspect", "export", "eval knn", "features")
NAMES = (
    *(b"a\nstopmim: error: b", b"a\x1b[2Jb", b"n" * 255, b"-x", b" ", b"[a]*?", b"{1..3}", b"%s%n"),
    *(b"a'b\"c", b"$(id)", b"<script>", b"tar:x", "a\u202eb".encode()),
)
VARIABLES = (
    *("LOCAL_WORLD_SIZE", "SLURM_CPUS_PER_TASK", "SLURM_PROCID", "OMP_NUM_THREADS", "HOME"),
    *("STOPMIM_WORKERS", "STOPMIM_CACHE", "XDG_CACHE_HOME", "COLUMNS", "LINES", "TERM", "TZ"),
)
VALUES = (
    *(
        "",
        "x",
        "0",
        "-1",
        "9" * 5000,
        "1e400",
        "nan",
        "\u00b2",
        "\u0663",
        "\n",
        "n" * 300,
        "\udce9",
    ),
    *("/dev/full", "/dev/zero", "/nowhere/a", "a/b"),
)
STEPS = ("step-99999999", "step-zzzzzzzz", "step-\u0663" + "\u0663" * 7, "step--0000001")


def case(case: Case) -> None:
    kinds = (
        *(streams, names, caches, descriptors, forged, killed_repair, told_to_end, at_once),
        *(variables, hard_links, killed_evaluation),
    )
    kind = kinds[case.number % len(kinds)]
    case.about = kind.__name__
    kind(case)


def half(case: Case, name: str = "run") -> Path:
    return copy(case.shared / "half", case.folder / name)


def resume(case: Case, run: Path, before: Callable[[], object] = lambda: None) -> None:
    line = words(case.shared / "images", run, case.shared / "config.yaml")
    done = case.start(*line, before=before).finish()
    case.judge(done, {0})
    need(same_model(run, case.shared / "whole"), f"resumed to another model: {done}")


def streams(case: Case) -> None:
    """A stream that is closed, full or read by nobody costs its text, and not the run."""
    number, how = case.dice.choice((1, 2)), case.dice.choice(("closed", "full", "broken"))
    case.about += f" {number} {how}"

    def spoil() -> None:
        if how == "closed":
            os.close(number)
            setattr(sys, ("stdout", "stderr")[number - 1], None)
        elif how == "full":
            os.dup2(os.open("/dev/full", os.O_WRONLY), number)
        else:
            reader, writer = os.pipe()
            os.close(reader)
            os.dup2(writer, number)

    run = half(case)
    line = words(case.shared / "images", run, case.shared / "config.yaml")
    done = case.start(*line, before=spoil).finish()
    full = number == 1 and how == "full"
    need(done.code == (5 if full else 0) and "Traceback" not in done.said, f"{done}")
    need(same_model(run, case.shared / "whole"), f"trained to another model: {done}")


def names(case: Case) -> None:
    """A run directory may have any name that is UTF-8."""
    run = half(case, os.fsdecode(case.dice.choice(NAMES)))
    case.about += f" {run.name[:40]!r}"
    for name in case.dice.sample(READERS, 2):
        done = perform(case, name, run, USUAL)
        need(done.code in {0, 2} | VERDICTS if name == "doctor" else done.code == 0, f"{done}")
    resume(case, run)


def caches(case: Case) -> None:
    """A cache that is damaged, exchanged or none changes no answer."""
    run, cache = half(case), case.folder / "cache"
    first = perform(case, "eval knn", run, USUAL)
    need(first.code == 0, f"{first}")
    files = sorted(cache.rglob("*.safetensors"))
    kind = case.dice.choice(("bytes", "exchanged", "pipe", "endless", "a file", "a loop"))
    case.about += f" {kind}"
    texts = [path.read_bytes() for path in files]
    if kind in ("a file", "a loop"):
        shutil.rmtree(cache)
        cache.write_text("x") if kind == "a file" else cache.symlink_to(cache)
        files = []
    for path, text, other in zip(files, texts, texts[1:] + texts[:1], strict=False):
        path.unlink()
        if kind == "bytes":
            path.write_bytes(case.dice.choice(BYTES)(text, case.dice))
        elif kind == "exchanged":
            path.write_bytes(other)
        elif kind == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to("/dev/zero")
    again = perform(case, "eval knn", run, USUAL)
    need(again.code == 0 and again.printed == first.printed, f"another answer: {again}")


def descriptors(case: Case) -> None:
    """Too few open files are one line."""
    count = case.dice.randrange(16, 48)
    case.about += f" {count}"
    run = half(case)
    line = words(case.shared / "images", run, case.shared / "config.yaml")
    limit = resource.RLIMIT_NOFILE
    case.run(
        *line, "--runtime.workers", "2", before=lambda: resource.setrlimit(limit, (count,) * 2)
    )
    resume(case, run)


def forged(case: Case) -> None:
    """What was made to be believed: a wrong name, a right seal; repaired, or refused."""
    run, dice = half(case), case.dice
    newest = run / "checkpoints" / "step-00000006"
    kind = dice.choice(("name", "seal", "list", "deep"))
    case.about += f" {kind}"
    if kind == "name":
        shutil.copytree(newest, run / "checkpoints" / dice.choice(STEPS))
    elif kind == "seal":
        about = json.loads((run / "run.json").read_text())
        place = dice.choice((about["starts"][0], about["data"]["sample"], about))
        place[dice.choice([*place, "\u0663", "9" * 5000])] = dice.choice(ABSURD)
        forgeable = isinstance(about.get("data"), dict) and isinstance(about.get("starts"), list)
        (run / "run.json").write_text(json.dumps(sealed(about) if forgeable else about))
    elif kind == "list":
        manifest = json.loads((newest / "manifest.json").read_text())
        one = manifest["files"]["model.safetensors"]
        manifest["files"] |= {f"{i}/model.safetensors": one for i in range(100_000)}
        (newest / "manifest.json").write_text(json.dumps(manifest))
    else:
        _nest(run / "checkpoints" / ".tmp-deep")
    for name in ("doctor", "inspect", "resume"):
        perform(case, name, run, USUAL)
    case.run("repair", run)
    if kind == "deep":  # which Python's own functions, as those that clean up, cannot remove
        os.system(f"rm -rf '{run}/damaged'")
    elif kind != "seal":  # which may hold anything, and then there is nothing to compare with
        resume(case, run)


def _nest(path: Path) -> None:
    path.mkdir()
    where = os.open(path, os.O_RDONLY)
    for _ in range(2 * sys.getrecursionlimit()):
        os.mkdir("x", dir_fd=where)
        inner = os.open("x", os.O_RDONLY, dir_fd=where)
        os.close(where)
        where = inner
    os.close(where)


def killed_repair(case: Case) -> None:
    """A repair that is killed at any moment, and repeated, repairs."""
    run, dice = half(case), case.dice
    model = run / "checkpoints" / "step-00000006" / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1] + b"x")
    (run / "run.json").write_text("junk")
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join([lines[0], b"junk\n", *lines[2:]]))
    started = case.start("repair", run)
    started.wait(dice.uniform(0, 0.4))
    started.signal(signal.SIGKILL)
    started.finish()
    done = case.run("repair", run)
    need(done.code == 0, f"{done}")
    resume(case, run)
    need(not list(run.glob(".*")), "temporary files are left in the run")


def told_to_end(case: Case) -> None:
    """SIGTERM or Ctrl-C leaves no half of an export, of features or of a report."""
    name, number = case.dice.choice(READERS[1:]), case.dice.choice((signal.SIGTERM, signal.SIGINT))
    run, out = half(case), case.folder / "out"
    out.mkdir()
    case.about += f" {name} {number.name}"
    lines: dict[str, list[str | Path]] = {
        "report": ["report", run, "--out", out / "r.html"],
        "inspect": ["inspect", run],
        "export": ["export", run, "--to", "safetensors", "--out", out / "x"],
        "eval knn": ["eval", "knn", run, "--data", "scenes:40:16", "--random-inits", "1"],
        "features": ["features", "scenes:40:16", "--encoder", run, "--out", out / "f.npz"],
    }
    started = case.start(*lines[name])
    started.wait(case.dice.uniform(0, 0.8))
    started.signal(number)
    case.judge(started.finish(), {0, 128 + number, -number})
    hidden = [path.name for path in (*out.glob(".*"), *run.glob(".*"))]
    need(not hidden, f"temporary files are left: {hidden}")


def at_once(case: Case) -> None:
    """Results of evaluations that end together, beside a repair, are all kept, in order."""
    run = half(case)
    before = len(parse_jsonl(run / "results.jsonl"))
    with (run / "results.jsonl").open("a") as file:
        file.write("junk\n")
    data: list[str | Path] = ["--data", "scenes:40:16", "--random-inits", "1"]
    started = [case.start("eval", "knn", run, *data) for _ in range(2)]
    started[0].wait(case.dice.uniform(0, 1.0))
    started.append(case.start("repair", run))
    for one in started:
        case.judge(one.finish(), DOCUMENTED - {4})
    case.run("repair", run)
    lines = parse_jsonl(run / "results.jsonl")
    single = half(case, "single")
    case.run("eval", "knn", single, *data)
    new = len(parse_jsonl(single / "results.jsonl")) - before
    need(len(lines) == before + 2 * new, f"{len(lines)} results, not {before} + 2 * {new}")
    numbers = [line.number for line in lines]
    need(len(set(numbers)) == len(numbers), f"results of the same number: {numbers}")
    need(count_lines(lines).damaged == 0, "a damaged result")


def variables(case: Case) -> None:
    """Whatever a variable of the environment holds, a command ends as documented."""
    run, name, value = half(case), case.dice.choice(VARIABLES), case.dice.choice(VALUES)
    case.about += f" {name}={value[:20]!r}"

    def spoil() -> None:
        os.chdir(case.folder)  # a relative cache lies there
        os.environ[name] = value

    evaluation: list[str | Path] = ["eval", "knn", run, "--data", "scenes:40:16"]
    case.run(*evaluation, "--random-inits", "1", before=spoil)
    line = words(case.shared / "images", run, case.shared / "config.yaml")
    case.run(*line, "--runtime.workers", "null", before=spoil)
    resume(case, run)


def hard_links(case: Case) -> None:
    """A copy of a run by hard links shares nothing that a command writes."""
    run, twin = half(case), case.folder / "twin"
    shutil.copytree(run, twin, copy_function=os.link)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for name in case.dice.sample(READERS, 2):
        perform(case, name, twin, USUAL)
    case.run("repair", twin)
    resume(case, twin)
    changed = [path.name for path, text in before.items() if path.read_bytes() != text]
    need(not changed, f"files of the original have changed: {changed}")
    resume(case, run)


def killed_evaluation(case: Case) -> None:
    """An evaluation that is killed at any moment, and repeated, prints what it would have."""
    run, protocol = half(case), case.dice.choice(("knn", "linear", "lowshot", "finetune"))
    case.about += f" {protocol}"
    labels = ["--per-class", "2"] if protocol in ("lowshot", "finetune") else []
    data = ["--data", "scenes:40:16", "--random-inits", "0", *labels]
    for _ in range(case.dice.randint(1, 3)):
        started = case.start("eval", protocol, run, *data)
        started.wait(case.dice.uniform(0, 1.5))
        started.signal(signal.SIGKILL)
        started.finish()
    killed = case.run("eval", protocol, run, *data)
    lines = parse_jsonl(run / "results.jsonl")
    for folder in (case.folder / "cache", run):
        shutil.rmtree(folder, ignore_errors=True)
    whole = case.run("eval", protocol, half(case), *data)
    need(killed.code == whole.code == 0, f"{killed}; {whole}")
    need(killed.printed == whole.printed, f"other numbers: {killed.printed!r}, {whole.printed!r}")
    need(count_lines(lines).damaged == 0, "a damaged result")


FAMILY = Family(
    "surroundings",
    "streams, limits, caches, names and kills around a command cost one line, and no run",
    quick=24,
    long=400,
    case=case,
    prepare=prepare,
)
