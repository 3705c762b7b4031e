"""Progress as a person sees it: whole at every width, and in a log file."""

import io
import re
import time

import pyte
import pytest
import torch
from rich.console import Console

from stopmim.base import console
from stopmim.base.console import LONGEST, MISTAKES, Ticker, as_line, busy, complain
from stopmim.base.errors import UserError
from stopmim.train.progress import Progress, time_of_day
from tiny import tiny

# Steps done, all steps, steps per epoch, epochs: of a short run, and of the paper's longest.
SHORT, LONG = (7, 60, 6, 10), (123_456, 375_600, 626, 600)


def shown(width: int, run: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch) -> str:
    """The screen of a terminal of 24 lines in the middle of a run."""
    file = io.StringIO()
    terminal = Console(file=file, force_terminal=True, width=width, height=24, color_system=None)
    monkeypatch.setattr(console, "console", terminal)
    done, total, per_epoch, epochs = run
    config = tiny(**{"optim.epochs": epochs, "optim.batch_size": 2048})
    values = {"loss": torch.tensor(0.1234), "target_std": torch.tensor(0.321)}
    with Ticker("pretrain", total, done - 2) as ticker:
        progress = Progress(ticker, config, per_epoch)
        ticker.start -= 1
        for step in (done - 1, done):
            progress.show(step, values, 1e-3, read=True)
        # As if every update had taken a quarter of a second, at 12,345 images a second.
        ticker.mark = (done - 1, ticker.now - 0.25)
        progress.rate = 12345.6
        progress.show(done, values, 1e-3, read=True)
        assert ticker.live
        ticker.live.refresh()
        screen = pyte.Screen(width, 24)
        pyte.Stream(screen).feed(file.getvalue().replace("\n", "\r\n"))
    return "\n".join(line.rstrip() for line in screen.display).strip()


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("run", [SHORT, LONG], ids=["short", "long"])
def test_every_named_item_is_whole_and_the_rest_gives_way(
    width: int, run: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = shown(width, run, monkeypatch)
    done, total, per_epoch, epochs = run
    items = re.split(r" {2,}|\n|pretrain |\u2501 ", text)
    left = r"0:1\d left" if run == SHORT else r"17:3\d:\d\d left"
    assert any(re.fullmatch(left, item) for item in items), text
    rest = [f"{done}/{total}", f"{100 * done // total} %", "12346 img/s", "loss 0.1234"]
    for item in (*rest, f"epoch {-(-done // per_epoch)}/{epochs}"):
        assert item in items, (item, text)
    assert ("lr 1.0e-03" in items) == ("target std 0.321" in items) == (width == 120), text
    assert "..." not in text
    assert len(text.splitlines()) == (2 if width == 60 else 1), text


def test_a_log_file_has_whole_lines_of_80_columns_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file, now = io.StringIO(), [0.0]
    monkeypatch.setattr(console, "console", Console(file=file))
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with Ticker("pretrain", 10_000) as ticker:
        for step in range(1, 10_001):
            now[0] += 0.5
            numbers = (f"epoch {step // 100}/100", "12346 img/s", "loss 0.4321")
            ticker.update(step, *numbers, extra=["lr 1.0e-03", "target std 0.321"])
    lines = file.getvalue().splitlines()
    assert 80 < len(lines) < 120  # of 5,000 seconds
    assert lines[0] == "pretrain 21/10000  0 %  1:23:10 left  epoch 0/100  12346 img/s  loss 0.4321"
    assert lines[-1].startswith("pretrain 10000/10000  100 %  0:00 left  epoch 100/100")
    assert max(map(len, lines)) <= 80


def test_the_time_left_is_told_without_the_first_item_which_may_be_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    ticker = Ticker("pretrain", 110, 7)
    assert ticker.seconds_left is None
    for done, at in ((8, 90.0), (9, 91.0), (10, 92.0)):
        now[0] = at
        ticker.update(done)
    assert ticker.seconds_left == 100
    now[0] += 5
    assert ticker.seconds_left == 95  # it goes on between two updates


def test_a_compilation_now_and_then_does_not_make_it_days(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates of a new shape take a minute, the others 10 ms: 10 s are left, and never hours."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    ticker, said = Ticker("pretrain", 1100), []
    for step in range(1, 101):
        now[0] += 60 if step in (1, 2, 5, 40) else 0.01
        ticker.update(step)
        said.append(ticker.seconds_left)
    assert said[0] is None
    assert said[-1] == pytest.approx(10, rel=0.1)
    assert max(left for left in said[2:] if left) < 12


def test_there_is_a_sign_of_life_only_where_something_takes_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "QUIET", 60.0)
    with busy("reading"), Ticker("check", 3):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(console, "QUIET", 0.05)
    said, until = "", time.monotonic() + 20
    with busy("reading"), Ticker("check", 3):
        while said.count("\n") < 2 and time.monotonic() < until:
            time.sleep(0.01)
            said += capsys.readouterr().err
    assert set(said.splitlines()) == {"reading ...", "check 0/3  0 %  first one: 0:00 so far"}


def test_the_end_on_another_day_has_its_date() -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d", time_of_day(90_000))
    assert re.fullmatch(r"\d\d:\d\d", time_of_day(0))


def test_an_error_is_one_line_whatever_its_text(capsys: pytest.CaptureFixture[str]) -> None:
    forged = "a\nstopmim: error: b\r\x1b[2J\u202e\ud800\u2028c"
    complain(UserError(forged))
    said = capsys.readouterr().err
    assert said == "stopmim: error: a\\nstopmim: error: b\\r\\x1b[2J\\u202e\\ud800\\u2028c\n"
    for text in ("x" * 10**7, "\n" * 10**7, "\U0001f600" * 10**6):
        line = as_line(f"begin {text} end")
        assert len(line) <= LONGEST
        assert line.startswith("begin ")
        assert line.endswith(" end")
        assert line.isprintable()


def test_each_mistake_has_a_line_and_many_have_few(capsys: pytest.CaptureFixture[str]) -> None:
    error = UserError(*(f"mistake {i}" for i in range(30)))
    assert str(error).splitlines() == [f"mistake {i}" for i in range(30)]
    complain(error)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "stopmim: error: mistake 0"
    assert said[-1] == f"stopmim: error: and {30 - MISTAKES} more mistakes"
    assert len(said) == MISTAKES + 1


def test_a_warning_is_one_line_too(capsys: pytest.CaptureFixture[str]) -> None:
    console.warn("a\nstopmim: error: b")
    assert capsys.readouterr().err.count("\n") == 1


def test_a_message_has_the_lines_that_were_meant(capsys: pytest.CaptureFixture[str]) -> None:
    """A name in it may hold line breaks, and codes that clear the screen."""
    console.say("runs/a\nstopmim: error: b\x1b[2J: resumes", "next")
    assert capsys.readouterr().err == "runs/a\\nstopmim: error: b\\x1b[2J: resumes\nnext\n"
