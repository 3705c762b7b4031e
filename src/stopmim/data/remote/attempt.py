"""One attempt to fetch a file at a URL through fsspec, and the meaning of its failure."""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from stopmim.base.errors import DataError, UserError, setting
from stopmim.base.secrets import reveal, shown
from stopmim.base.waiting import within

# Protocol -> package that it needs. Other protocols of fsspec may read files the user did not name.
PROTOCOLS = {
    "http": "aiohttp", "https": "aiohttp", "s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs",
    "hf": "huggingface_hub", "az": "adlfs", "abfs": "adlfs", "memory": "fsspec",
}  # fmt: skip
BLOCK = 2**20
REDIRECTS = 5
_AGAIN = {408, 425, 429, 500, 502, 503, 504}  # statuses of HTTP that are temporary
_NO_VERSION = re.compile(r"\s*(W/)?\"?\"?\s*")

T = TypeVar("T")


class About(NamedTuple):
    """Size and version of a file, as its server reports them."""

    size: int
    version: str  # its ETag or the like; "" if there is none


class RemoteError(DataError):
    """A remote file cannot be fetched, or has changed."""


class MissingError(RemoteError):
    """There is no such file."""


class DeniedError(RemoteError):
    """The server wants other credentials."""


class AgainError(Exception):
    """A temporary failure: the attempt may be repeated."""

    def __init__(self, reason: object, after: float = 0.0) -> None:
        super().__init__(" ".join(shown(str(reason)).split())[:200])
        self.after = after  # seconds that the server asks to wait


def is_url(text: str) -> bool:
    return re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*://", text) is not None


def stall() -> float:
    """Seconds without a byte after which a request is repeated."""
    return setting("STOPMIM_REMOTE_STALL", 30.0)


class Http:
    """An answer to a GET of a range, by the session that fsspec has set up."""

    def __init__(self, files: Any, url: str, start: int, count: int | None) -> None:
        self.files, self.url = files, url
        last = "" if count is None else str(start + count - 1)
        headers = {**files.kwargs.get("headers", {}), "Accept-Encoding": "identity"}
        headers["Range"] = f"bytes={start}-{last}"
        self.response = self._wait(self._get, files.kwargs | {"headers": headers})
        try:
            self._judge(start)
        except BaseException:
            self.close()
            raise

    async def _get(self, options: dict[str, Any]) -> Any:
        session = await self.files.set_session()
        address = self.files.encode_url(reveal(self.url))
        return await session.get(address, max_redirects=REDIRECTS, **options)

    def _wait(self, function: Callable[..., Any], *arguments: Any) -> Any:
        from fsspec.asyn import sync

        try:
            return sync(self.files.loop, function, *arguments, timeout=stall())
        except Exception as error:
            raise _failed(self.url, error) from None

    def _judge(self, start: int) -> None:
        status, headers = self.response.status, self.response.headers
        if status in _AGAIN:
            raise AgainError(f"HTTP {status}", _number(headers.get("Retry-After", "")))
        if status in (404, 410):
            raise MissingError(f"{self.url}: no such file (HTTP {status})")
        if status in (401, 403):
            raise DeniedError(f"{self.url}: access refused (HTTP {status}); check the credentials")
        if status not in (200, 206):
            raise RemoteError(f"{self.url}: HTTP {status}; expected a file")
        if (coding := headers.get("Content-Encoding", "identity")) != "identity":
            raise RemoteError(
                f"{self.url}: the server encodes it ({coding[:20]!r}); have it served as it is"
            )
        whole = re.fullmatch(
            r"bytes (\d{1,18})-\d{1,18}/(\d{1,18})", headers.get("Content-Range", "")
        )
        if status == 206 and (not whole or int(whole[1]) != start):
            raise AgainError("sent other bytes than requested")
        length = whole[2] if whole and status == 206 else headers.get("Content-Length", "")
        if not re.fullmatch(r"\d{1,18}", length):
            raise RemoteError(f"{self.url}: the server states no size; serve it as a plain file")
        version = headers.get("ETag", "")
        self.about = About(int(length), "" if _NO_VERSION.fullmatch(version) else version[:200])
        self.start = start if status == 206 else 0

    def read(self) -> bytes:
        return self._wait(self.response.content.readany)

    def close(self) -> None:
        self.files.loop.call_soon_threadsafe(self.response.close)


class Other:
    """A file of another protocol, fetched by the package for it."""

    def __init__(self, files: Any, url: str, start: int, count: int | None) -> None:
        self.url, self.start, path = url, start, _path(files, url)
        facts = self._wait(lambda: files.info(path))
        if facts.get("type") == "directory" or not isinstance(facts.get("size"), int):
            raise MissingError(f"{url}: not a file")
        marks = [facts.get(key) for key in ("ETag", "etag", "md5Hash", "blob_id", "LastModified")]
        self.about = About(facts["size"], next((str(mark)[:200] for mark in marks if mark), ""))
        self.file: Any = None
        if count is None:
            options = {"block_size": BLOCK, "cache_type": "readahead"}
            self.file = self._wait(lambda: files.open(path, "rb", **options))
            self._wait(lambda: self.file.seek(start))

    def _wait(self, function: Callable[[], T]) -> T:
        try:
            return within(stall(), function)
        except Exception as error:
            raise _failed(self.url, error) from None

    def read(self) -> bytes:
        return self._wait(lambda: self.file.read(BLOCK))

    def close(self) -> None:
        if self.file is not None:
            with contextlib.suppress(Exception):
                self.file.close()


@contextlib.contextmanager
def opened(url: str, start: int, count: int | None) -> Iterator[Http | Other]:
    """The file from byte `start` on, or `count` bytes of it, as it is received.

    `about` is the whole file, `start` the offset of the first byte received; `read` returns the
    next bytes, none at the end.
    """
    is_http = url.startswith(("http://", "https://"))
    answer = (Http if is_http else Other)(_filesystem(url), url, start, count)
    with contextlib.closing(answer):
        yield answer


def find(pattern: str) -> list[str]:
    """Sorted URLs that a glob stands for."""
    scheme, files = pattern.partition("://")[0], _filesystem(pattern)
    try:
        found = within(stall(), lambda: files.glob(_path(files, pattern)))
    except FileNotFoundError:
        return []
    except Exception as error:
        raise _failed(pattern, error) from None
    return sorted(f"{scheme}://{str(name).removeprefix(f'{scheme}://')}" for name in found)


def _filesystem(url: str) -> Any:
    scheme = url.partition("://")[0]
    if scheme not in PROTOCOLS:
        names = ", ".join(f"{name}://" for name in PROTOCOLS if name != "memory")
        raise UserError(f"{url}: not a supported protocol; use one of {names}")
    try:
        import fsspec
    except ImportError:
        raise UserError(f'{url}: URLs need fsspec: pip install "stopmim[remote]"') from None
    options: dict[str, Any] = {}
    if scheme in ("http", "https"):
        # As the user has configured it for fsspec. Nothing is decompressed: a few bytes can be
        # gigabytes. The environment has proxies and .netrc.
        own = dict(fsspec.config.conf.get(scheme, {})).get("client_kwargs", {})
        options = {"client_kwargs": {"trust_env": True, **own, "auto_decompress": False}}
    try:
        return fsspec.filesystem(scheme, **options)
    except ImportError:
        package = PROTOCOLS[scheme]
        what = '"stopmim[remote]"' if package == "aiohttp" else package
        raise UserError(f"{url}: {scheme}:// needs {package}: pip install {what}") from None


def _path(files: Any, url: str) -> str:
    return str(files._strip_protocol(reveal(url)))


def _failed(url: str, error: Exception) -> Exception:
    """Our error for an exception of fsspec, or of a package below it."""
    name = type(error).__name__
    if isinstance(error, AgainError | UserError):
        return error
    if isinstance(error, TimeoutError):
        return AgainError(f"sent nothing for {stall():g} s")
    if isinstance(error, FileNotFoundError):
        return MissingError(f"{url}: no such file")
    if isinstance(error, PermissionError):
        return DeniedError(f"{url}: access refused; check the credentials")
    if name in (
        "TooManyRedirects",
        "NonHttpUrlRedirectClientError",
        "InvalidUrlRedirectClientError",
    ):
        return RemoteError(f"{url}: leads to no file: {_words(name)}")
    if "Certificate" in name or "InvalidURL" in name or isinstance(error, ValueError):
        return RemoteError(f"{url}: {_words(name)}: {AgainError(error)}")
    return AgainError(f"{_words(name)}: {error}" if str(error) else _words(name))


def _words(name: str) -> str:
    """The name of an exception as words."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()


def _number(text: str) -> float:
    """Seconds of a Retry-After header; 0 if it is a date, or empty."""
    return float(text) if re.fullmatch(r"\d{1,6}", text) else 0.0
