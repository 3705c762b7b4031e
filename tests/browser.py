"""A real browser for tests: headless Chromium, driven through its debugging pipe.

``python tests/browser.py runs/demo/report.html docs/report.png`` takes the picture of the README.
"""

import base64
import fcntl
import io
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from PIL import Image

MISSING = "chromium is not installed: run .ci/browser (make test does), or apt-get install chromium"
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # a container has none, and the pages are our own
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--remote-debugging-pipe",
)


class Browser:
    """One page. `errors` collects its complaints, `requests` the addresses it asked for."""

    def __init__(self, profile: Path, *, dark: bool = False, wide: int = 1200) -> None:
        program = shutil.which("chromium") or shutil.which("chromium-browser")
        assert program, MISSING
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.said: list[dict[str, Any]] = []
        self.number, self.rest = 0, b""
        ours_r, theirs_w = os.pipe()
        theirs_r, ours_w = os.pipe()
        # Chromium reads descriptor 3 and writes 4: away from them first, or one could be the other.
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 50) for fd in (theirs_r, theirs_w)]
        null = os.open(os.devnull, os.O_RDWR)
        self.process = os.posix_spawn(
            program,
            [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, high[0], 3),
                (os.POSIX_SPAWN_DUP2, high[1], 4),
                (os.POSIX_SPAWN_DUP2, null, 1),
                (os.POSIX_SPAWN_DUP2, null, 2),
            ],
        )
        for fd in (theirs_r, theirs_w, *high, null):
            os.close(fd)
        self.read, self.write = ours_r, ours_w
        self.session: str | None = None
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(t["targetId"] for t in targets if t["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.view(wide, dark=dark)

    def view(self, wide: int, *, dark: bool) -> None:
        """Makes the window `wide` pixels wide, with the reader's colour scheme."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        size = {"width": wide, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)
        os.close(self.read)
        os.close(self.write)

    def call(self, method: str, **params: Any) -> Any:
        """Sends one command and waits for its answer; events in between are recorded."""
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + 60
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == self.number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.read], [], [], max(0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            chunk = os.read(self.read, 1 << 20)
            assert chunk, "the browser has ended"
            self.rest += chunk
        line, _, self.rest = self.rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        given = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(given["exceptionDetails"]))
            case "Runtime.consoleAPICalled":
                self.errors.append(json.dumps(given["args"]))
            case "Log.entryAdded":
                self.errors.append(given["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(given["request"]["url"])
        self.said.append(message)
        return message

    def open(self, page: Path) -> float:
        """Shows `page`, and returns the seconds until it was drawn."""
        self.said.clear()
        begin, deadline = time.monotonic(), time.monotonic() + 60
        self.call("Page.navigate", url=page.resolve().as_uri())
        while not any(m.get("method") == "Page.loadEventFired" for m in self.said):
            self._receive(deadline)
        self.ask("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return time.monotonic() - begin

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        options = {"returnByValue": True, "awaitPromise": True}
        answer = self.call("Runtime.evaluate", expression=expression, **options)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def click(self, selector: str) -> None:
        """A real click, in the middle of the element, after scrolling to it."""
        place = self.ask(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            f"e.scrollIntoView({{block: 'center'}}); const r = e.getBoundingClientRect();"
            f"return [r.x + r.width / 2, r.y + r.height / 2]; }})()"
        )
        self.mouse("mousePressed", *place)
        self.mouse("mouseReleased", *place)

    def mouse(self, kind: str, x: float, y: float) -> None:
        pressed = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **pressed)

    def key(self, name: str) -> None:
        text = {"text": name} if len(name) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=name, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=name)

    def screenshot(self, *, full: bool = False) -> bytes:
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=full)
        return base64.b64decode(shot["data"])


def photograph(page: Path, out: Path, wide: int = 1100, high: int = 2700) -> None:
    """Writes the top of `page` as a PNG of few bytes; the run is called by its last two folders."""
    with tempfile.TemporaryDirectory() as profile, Browser(Path(profile)) as browser:
        browser.view(wide, dark=False)
        browser.call("Emulation.setScrollbarsHidden", hidden=True)
        browser.open(page)
        name = json.dumps("/".join(page.resolve().parts[-3:-1]))
        browser.ask(f"document.querySelector('.path').textContent = {name}")
        area = {"x": 0, "y": 0, "width": wide, "height": high, "scale": 1}
        options = {"format": "png", "clip": area, "captureBeyondViewport": True}
        shot = base64.b64decode(browser.call("Page.captureScreenshot", **options)["data"])
    picture = Image.open(io.BytesIO(shot)).convert("RGB")
    picture.quantize(255, dither=Image.Dither.NONE).save(out, optimize=True)


if __name__ == "__main__":
    photograph(Path(sys.argv[1]), Path(sys.argv[2]))
