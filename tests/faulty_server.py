"""An HTTP server on the loopback that serves a folder, with ranges, and fails on purpose.

A fault is planned per request of a file: the next unspent one of the plan is what happens. Without
a plan it is a good server. `log` has a line for every request.
"""

import base64
import contextlib
import http.server
import os
import re
import socket
import threading
import time
import urllib.parse
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

FAULTS = ("drop", "stall", "truncate", "wrong", "429", "503", "reset", "no-range", "restart")


class FaultyServer:
    """Serves `root` at `url`; `plan` are the faults still to come, taken from its front."""

    def __init__(self, root: Path, plan: list[str] | None = None, stall: float = 1.5) -> None:
        self.root, self.plan, self.stall = root, plan or [], stall
        self.log: list[tuple[str, str, str]] = []  # path, range, fault
        self.special: dict[str, Callable[[Any], None]] = {}  # path -> an answer of its own
        self.login = ""  # user:password that is asked for
        self.limit: int | None = None  # whole files it still sends; then it refuses connections
        self.down = 0.0  # until this time, every connection is refused
        self.lock = threading.Lock()
        self.connections: list[socket.socket] = []
        self.server = _Quiet(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    def spent(self) -> list[str]:
        return [fault for _, _, fault in self.log if fault]

    def fetched(self, name: str) -> int:
        """How many times the whole of a file was asked for without a fault."""
        return sum(path == f"/{name}" and r != "bytes=0-0" and not f for path, r, f in self.log)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        for connection in self.connections:  # which clients keep open
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                outer.connections.append(self.connection)

            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                with contextlib.suppress(OSError):
                    outer.answer(self)

        return Handler

    def answer(self, request: Any) -> None:
        path = request.path.partition("?")[0]
        asked = request.headers.get("Range", "")
        if time.monotonic() < self.down:
            return self.reset(request)
        if special := self.special.get(path):
            self.log.append((path, asked, "special"))
            return special(request)
        if self.login and request.headers.get("Authorization") != _basic(self.login):
            return answer_plain(request, 401, b"")
        file = self.root / urllib.parse.unquote(path[1:]).replace("/", "_")
        if not file.is_file():
            self.log.append((path, asked, ""))
            return answer_plain(request, 404, b"")
        with self.lock:
            # Only what is fetched fails: a look at the size is a short range.
            fault = self.plan.pop(0) if self.plan and asked != "bytes=0-0" else ""
            self.log.append((path, asked, fault))
            if self.limit is not None and asked != "bytes=0-0" and path.endswith(".tar"):
                self.limit -= 1
                if self.limit < 0:
                    return self.reset(request)
        self.serve(request, file.read_bytes(), asked, fault)

    def serve(self, request: Any, data: bytes, asked: str, fault: str) -> None:
        if fault == "reset":
            return self.reset(request)
        if fault == "restart":
            self.down = time.monotonic() + 0.3
            return self.reset(request)
        if fault in ("429", "503"):
            after = {"Retry_After": "0"} if fault == "429" else {}
            return answer_plain(request, int(fault), b"later", **after)
        part = re.fullmatch(r"bytes=(\d+)-(\d*)", asked)
        start, stop = 0, len(data)
        if part and fault != "no-range":
            start, stop = int(part[1]), min(len(data), int(part[2] or len(data)) + 1)
        body = data[start:stop]
        request.send_response(206 if part and fault != "no-range" else 200)
        if part and fault != "no-range":
            request.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        request.send_header("ETag", f'"{zlib.crc32(data):x}"')
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        half = len(body) // 2
        if fault == "wrong":
            body = body[:half] + bytes(b ^ 255 for b in body[half : half + 64]) + body[half + 64 :]
        if fault in ("drop", "truncate", "stall"):
            request.wfile.write(body[:half])
            request.wfile.flush()
            time.sleep(self.stall if fault == "stall" else 0.3)  # until they are read
            if fault == "drop":
                return self.reset(request)
            request.close_connection = True
            return None
        request.wfile.write(body)
        return None

    def reset(self, request: Any) -> None:
        """Ends the connection without an answer, or in the middle of it."""
        request.close_connection = True
        linger = b"\1\0\0\0\0\0\0\0"
        request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)


class _Quiet(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Clients leave when they like."""


def answer_plain(request: Any, status: int, body: bytes, **headers: str) -> None:
    request.send_response(status)
    for name, value in headers.items():
        request.send_header(name.replace("_", "-"), value)
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    request.wfile.write(body)


def _basic(login: str) -> str:
    return "Basic " + base64.b64encode(login.encode()).decode()


@contextlib.contextmanager
def serving(root: Path, plan: list[str] | None = None, **options: Any) -> Iterator[FaultyServer]:
    server = FaultyServer(root, plan, **options)
    try:
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def impatient(cache: Path, **changes: str) -> Iterator[None]:
    """A cache of its own, and short waits, for this process and those that it starts."""
    names = {
        "STOPMIM_REMOTE_CACHE": str(cache),
        "STOPMIM_CACHE": str(cache / "index"),
        "STOPMIM_REMOTE_STALL": "1",
        "STOPMIM_REMOTE_PATIENCE": "20",
    } | changes
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
