"""Training as a SLURM job: one task per GPU, requeued when its time is up or it is preempted.

A plain batch script is enough, because the same command resumes a run: whatever ends a job, it only
has to be started again. No daemon, no pickled function, nothing to install.
"""

import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stopmim.base.errors import ResourceError, StorageError, UserError
from stopmim.data.order import shares
from stopmim.method.build import configure
from stopmim.train.plan import as_options

GRACE = 120  # seconds before the time limit at which the run is told to save and exit


def script(
    data: str, out: Path, preset: str, changes: Mapping[str, Any], size: str, options: str = ""
) -> str:
    """The batch script for `size`, for example 2x8 for two nodes of eight GPUs.

    `options` are more options for sbatch, without dashes: "partition=gpu time=24:00:00".
    """
    if not (match := re.fullmatch(r"([1-9][0-9]{,4})x([1-9][0-9]{,4})", size)):
        raise UserError(f"--slurm: expected NODESxGPUS, for example 2x8, got {size!r}")
    if not str(out).isprintable():
        raise UserError(f"--out: {str(out)!r} has characters that a batch script cannot hold")
    nodes, gpus = int(match[1]), int(match[2])
    config = configure(preset, changes, to_train=True)
    shares(config.optim.batch_size, config.runtime.accumulate, 0, nodes * gpus)
    try:
        more = [f"--{word.lstrip('-')}" for word in shlex.split(options)]
    except ValueError as error:
        raise UserError(f"--sbatch: {options!r}: {str(error).lower()}") from None
    if not all(map(str.isprintable, more)):
        raise UserError(f"--sbatch: {options!r} has characters that a batch script cannot hold")
    words = [sys.executable, "-m", "stopmim", "pretrain", data, "--preset", preset]
    words += ["--out", str(out), *as_options(changes)]
    template = Path(__file__).with_name("slurm.sh").read_text(encoding="ascii")
    return template.format(
        name=shlex.quote(f"stopmim-{out.name}"),
        nodes=nodes,
        gpus=gpus,
        log=shlex.quote(f"{str(out).replace('%', '%%')}/slurm-%j.log"),  # SLURM expands %
        grace=GRACE,
        options="".join(f"#SBATCH {shlex.quote(word)}\n" for word in more),
        command=shlex.join(words),
    )


def submit(text: str, out: Path) -> str:
    """Submits the script with sbatch and returns the job id."""
    try:
        out.mkdir(parents=True, exist_ok=True)  # SLURM does not create the folder of its log
    except OSError as error:
        raise StorageError(f"{out}: cannot write here: {error.strerror}") from None
    try:
        command = ["sbatch", "--parsable"]
        done = subprocess.run(
            command, input=text, capture_output=True, check=False,
            encoding="utf-8", errors="surrogateescape",  # a path may be any bytes
        )  # fmt: skip
    except OSError as error:
        why = f"{error.strerror}; use --slurm on a machine that can submit jobs"
        raise ResourceError(f"sbatch: {why}") from None
    if done.returncode:
        message = " ".join(done.stderr.split())
        raise ResourceError(f"sbatch: {message or 'failed without a message'}")
    return done.stdout.strip().split(";")[0]
