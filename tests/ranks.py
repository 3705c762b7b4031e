"""Several real ranks, as forks of a process that has torch loaded: no import per rank."""

import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from stopmim.base.errors import UserError


class Ended(NamedTuple):
    code: int  # negative: the signal that killed it
    said: str  # its stderr


def start(
    size: int, folder: Path, job: Callable[[int], object], env: Mapping[str, str]
) -> list[multiprocessing.process.BaseProcess]:
    """Forks `size` processes with the environment that torchrun gives, each of them `job(rank)`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def child(rank: int) -> None:
        os.dup2(os.open(folder / f"{rank}.err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115 - pytest has its own
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "STOPMIM_TIMEOUT": "20",
            **env,
        }
        code = 0
        try:
            job(rank)
        except UserError as error:  # as the command line does
            code = error.exit_code
            if str(error):
                os.write(2, f"stopmim: error: {error}\n".encode())
        except BaseException as error:
            code = 1
            os.write(2, f"stopmim: error: internal error: {error}\n".encode())
        os._exit(code)

    folder.mkdir(parents=True, exist_ok=True)
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=child, args=(rank,)) for rank in range(size)]
    for process in processes:
        process.start()
    return list(processes)


def finish(
    processes: list[multiprocessing.process.BaseProcess], folder: Path, seconds: float = 60
) -> list[Ended]:
    until = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
    for process in processes:
        if process.exitcode is None and process.pid:
            os.kill(process.pid, signal.SIGKILL)
            process.join()
    return [
        Ended(process.exitcode or 0, (folder / f"{rank}.err").read_text())
        for rank, process in enumerate(processes)
    ]


def together(
    size: int, folder: Path, job: Callable[[int], object], env: Mapping[str, str] | None = None
) -> list[Ended]:
    return finish(start(size, folder, job, env or {}), folder)


def launched(size: int, folder: Path, job: Callable[[int], object]) -> list[Ended]:
    """As `together`, by a launcher like torchrun: when one has failed, the others have to leave."""
    processes = start(size, folder, job, {})
    until = time.monotonic() + 60
    while time.monotonic() < until and not any(process.exitcode for process in processes):
        time.sleep(0.02)
    for process in processes:
        process.terminate()
    return finish(processes, folder)


def complaints(ended: list[Ended]) -> list[str]:
    """The error lines of all ranks together."""
    return [line for rank in ended for line in rank.said.splitlines() if "stopmim: error:" in line]
