"""Servers and lists that mean harm, or are set up wrongly: one line each, and bounded."""

import gzip
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_tar import png, shard

from faulty_server import FaultyServer, answer_plain, impatient, serving
from stopmim.base.errors import DataError, UserError
from stopmim.data.decode import BadImageError
from stopmim.data.remote import cache as remote_cache
from stopmim.data.remote import fetch
from stopmim.data.sources.open import open_images

BLOCK = bytes(2**16)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FaultyServer]:
    shard(tmp_path / "www" / "a.tar", 0, 5)
    with serving(tmp_path / "www") as server:
        yield server


@pytest.fixture(autouse=True)
def _quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fetch, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(fetch, "QUIET", 0.1)  # warnings are read too
    monkeypatch.setenv("STOPMIM_URLS", "{}")
    with impatient(tmp_path / "cache", STOPMIM_REMOTE_PATIENCE="0.6"):
        yield


def pour(request: Any, seconds: float = 60.0) -> None:
    """Sends zeros for some time, or until the client leaves."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        request.wfile.write(BLOCK)


def endless(request: Any) -> None:
    request.send_response(200)
    request.end_headers()
    pour(request)


def chunked(request: Any) -> None:
    request.send_response(200)
    request.send_header("Transfer-Encoding", "chunked")
    request.end_headers()
    until = time.monotonic() + 60
    while time.monotonic() < until:
        request.wfile.write(b"%x\r\n%b\r\n" % (len(BLOCK), BLOCK))


def endless_header(request: Any) -> None:
    request.wfile.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
    pour(request)


def more_than_stated(request: Any) -> None:
    request.send_response(200)
    request.send_header("Content-Length", "1000")
    request.end_headers()
    pour(request, 0.5)


def other_total(request: Any) -> None:
    """Says another size at each answer."""
    request.server.asked = getattr(request.server, "asked", 0) + 1
    size = 1000 * request.server.asked
    request.send_response(206)
    request.send_header("Content-Range", f"bytes 0-{size - 1}/{size}")
    request.send_header("Content-Length", str(size))
    request.end_headers()
    request.wfile.write(bytes(size))


def other_range(request: Any) -> None:
    answer_plain(request, 206, bytes(10), Content_Range="bytes 90-99/100")


def compressed(request: Any) -> None:
    answer_plain(request, 200, gzip.compress(bytes(10**6)), Content_Encoding="gzip")


def loop(request: Any) -> None:
    answer_plain(request, 302, b"", Location=request.path)


def to_a_file(request: Any) -> None:
    answer_plain(request, 302, b"", Location="file:///etc/passwd")


def a_page(request: Any) -> None:
    answer_plain(request, 200, b"<html>sign in first</html>")


def vast(request: Any) -> None:
    answer_plain(request, 206, b"x", Content_Range=f"bytes 0-0/{10**17}")


def silent(request: Any) -> None:
    time.sleep(2.0)


def garbage(request: Any) -> None:
    """aiohttp quotes the URL in its message about this."""
    request.wfile.write(b"garbage\r\n\r\n")
    request.close_connection = True


def teapot(request: Any) -> None:
    answer_plain(request, 418, b"\x1b]0;owned\x07" * 1000)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (endless, "the server states no size"),
        (chunked, "the server states no size"),
        (endless_header, "unavailable for"),
        (more_than_stated, "no images in 1 tar shards|unavailable for"),
        (other_total, "changed while it was read: bytes 1000 -> 2000"),
        (other_range, "unavailable for .* sent other bytes than requested"),
        (compressed, "the server encodes it .'gzip'."),
        (loop, "leads to no file: too many redirects"),
        (to_a_file, "leads to no file: "),
        (a_page, "no images in 1 tar shards"),
        (vast, "100000000000000000 bytes, more than the budget"),
        (silent, "unavailable for .* sent nothing for 1 s"),
        (garbage, "unavailable for .* client response error: 400"),
        (teapot, "HTTP 418; expected a file"),
    ],
)
def test_an_answer_that_is_no_file_is_one_line(
    answer: Callable[[Any], None],
    said: str,
    server: FaultyServer,
    capfd: pytest.CaptureFixture[str],
) -> None:
    server.special["/x.tar"] = answer
    begin = time.monotonic()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    secret = f"{server.url.replace('://', '://me:hunter2@')}/x.tar?token=hunter2"
    with pytest.raises(DataError, match=said) as met:
        open_images(secret)
    assert str(met.value).isprintable()
    assert "hunter2" not in str(met.value)  # whatever a library quotes
    assert "hunter2" not in "".join(capfd.readouterr())
    assert time.monotonic() - begin < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB
    assert sum(path.stat().st_size for path in remote_cache.folder().rglob("*")) < 10**6


# ------------------------------------------------------------------------------ lists


def test_a_list_of_urls(server: FaultyServer, tmp_path: Path) -> None:
    (tmp_path / "www" / "one.png").write_bytes(png(1))
    (tmp_path / "www" / "two.png").write_bytes(png(2))
    lines = f"one.png,cat\n{server.url}/two.png?sig=9,dog\ngone.png,dog\n"
    (tmp_path / "www" / "list.csv").write_text(lines)
    images = open_images(f"{server.url}/list.csv")
    assert [int(images.read(i)[0, 0, 0]) for i in (0, 1)] == [1, 2]
    assert images.labels["class"].tolist() == [0, 1, 1]
    assert images.name(1) == f"{server.url}/two.png"
    with pytest.raises(BadImageError, match=r"gone\.png: no such file"):
        images.read(2)
    (tmp_path / "own.txt").write_text(f"{server.url}/two.png\n{server.url}/one.png\n")
    local = open_images(tmp_path / "own.txt")
    assert [int(local.read(i)[0, 0, 0]) for i in (0, 1)] == [2, 1]
    assert server.fetched("one.png") == 1  # the copy serves both


@pytest.mark.parametrize(
    "line",
    [
        "file:///etc/passwd.png",
        "/etc/passwd.png",
        "../../secret.png",
        "..\\secret.png",
        "memory://x/y.png",
        "local:///etc/x.png",
        "zip://a.zip::file:///x.png",
    ],
)
def test_a_remote_list_leads_nowhere_else(line: str, server: FaultyServer, tmp_path: Path) -> None:
    (tmp_path / "www" / "list.txt").write_text(f"one.png\n{line}\n")
    with pytest.raises(DataError, match=r"list\.txt: .*: not (a URL that|below)"):
        open_images(f"{server.url}/list.txt")


def test_a_local_list_of_urls_names_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("http://127.0.0.1/a.png\nb.png\n")
    with pytest.raises(DataError, match=r"list\.txt: b\.png: not a URL, as other lines are"):
        open_images(tmp_path / "list.txt")


def test_urls_that_differ_in_their_query_alone_are_refused(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("http://h/a.png?file=1\nhttp://h/a.png?file=2\n")
    with pytest.raises(DataError, match="is listed 2 times, but for its query"):
        open_images(tmp_path / "list.txt")


# ------------------------------------------------------------------------------ names


@pytest.mark.parametrize(
    ("source", "error", "said"),
    [
        ("ftp://host/x.tar", UserError, "not a supported protocol; use one of http://"),
        ("s3://bucket/x.tar", UserError, "s3:// needs s3fs: pip install s3fs"),
        ("file:///data/x.tar", DataError, "give the path alone: /data/x.tar"),
        ("simplecache::http://h/x.tar", DataError, "no such folder or file"),
        ("http://h/x.tar.gz", DataError, "a compressed tar has no random access"),
        ("http://127.0.0.1:9/*.tar", DataError, "http cannot list files; name them with braces"),
    ],
)
def test_a_url_that_cannot_be_read_says_why(source: str, error: type, said: str) -> None:
    with pytest.raises(error, match=said):
        open_images(source)
