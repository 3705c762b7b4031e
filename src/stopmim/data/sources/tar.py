"""Tar shards in the layout of WebDataset, read in place and never unpacked.

The headers are walked once, for the shard, offset and size of each image. Then any image is one
`pread`: random access, which makes resuming exact. Names in an archive appear in messages and are
never used as paths. Only regular members count: links, devices and sparse files are skipped.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from stopmim.base.errors import DataError
from stopmim.base.files import open_to_read
from stopmim.data import index_cache as cache
from stopmim.data.decode import EXTENSIONS, MAX_BYTES, BadImageError
from stopmim.data.rasters.open import EXTENSIONS as ARRAY_EXTENSIONS
from stopmim.data.remote.cache import RemoteFiles
from stopmim.data.sources.file_images import SAMPLE
from stopmim.data.sources.packed import read_index
from stopmim.data.sources.shards import Shards, find_shards, names_shards
from stopmim.data.sources.source import MAX_SHARD, PackedPaths, Source, Split, printable

BLOCK = 512
AHEAD = 2**14  # bytes read at once: small members beside an image come with its header
MAX_MEMBERS = 10_000_000  # per shard
MAX_NAME = 2**16
MAX_RECORD = 2**20  # pax headers and .json members
WINDOW = 16_384  # samples that the order of an epoch mixes at a time
_PICTURES, _ARRAYS = ({e.encode() for e in known} for known in (EXTENSIONS, ARRAY_EXTENSIONS))
_WITHOUT_DATA = b"123456"  # links, devices, folders, pipes: their headers may claim any size
COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst", ".tar.lz4")


class DamagedError(Exception):
    """A shard stops being a tar archive here; what comes before is used."""


class Member(NamedTuple):
    name: bytes
    at: int  # offset of its data in the file
    size: int
    start: bytes = b""  # up to 512 bytes of its data
    label: int | None = None  # of the sample that it is the image of


class Shard(NamedTuple):
    samples: list[Member]
    problem: str  # why part of it is lost; "" if it is whole
    torn: int  # samples at its end whose label may lie beyond the damage


class Tar(Shards):
    """The images of tar shards, in the order of the shards and of their members.

    A sample is a run of members whose names are equal up to the first dot after the last slash,
    as in WebDataset. Its image is the first member with only an image extension after that dot
    (``a.jpg``, not ``a.mask.png``); without such a member all images of the run count.
    The label "class" is an integer in a ``.cls`` member, or "label" or "cls" in a ``.json`` member,
    if every sample has one. Shards that are damaged are `unreadable` from there on.
    """

    window = WINDOW
    label_hint = 'add a .cls or .json ({"label": 3}) member with an integer beside every image'

    def __init__(self, shards: Sequence[str]) -> None:
        super().__init__(shards)
        remote = isinstance(shards, RemoteFiles)
        key = b"\0".join(map(os.fsencode, self._places))
        began, state = time.time_ns(), self._states()
        index = cache.load("tar", key)
        if index is None or not np.array_equal(index["state"], state):
            index = self._index(state[:, 0]) | {"state": state}
            # Not cached if a shard is missing: it may be back at any time.
            settled = state.min() >= 0 and state[:, 1].max() < began - cache.SETTLED_NS
            if remote or (len(index["at"]) >= cache.WORTH_IT and settled):
                cache.store("tar", key, index)
        self._names = PackedPaths(index["names"], index["offsets"])
        self._at, self._size, self.chunks = index["at"], index["size"], index["chunks"]
        self.labels = {"class": index["label"]} if len(index["label"]) else {}
        self.fingerprint = index["fingerprint"].tobytes().decode()
        self.unreadable = index["unreadable"].tobytes().decode().splitlines()
        folders = {os.path.dirname(place) for place in self._places}
        # Remote shards with an index are those of indexed_tar.py.
        packed = read_index(folders.pop()) if len(folders) == 1 and not remote else None
        self.classes = packed.classes if packed and self.labels else []
        # Few images have the same order as in a folder: a run on either sees the same.
        self.any_order = packed is not None and len(self) <= WINDOW
        if not len(self):
            lost = f" ({self.unreadable[0]})" if self.unreadable else ""
            raise DataError(
                f"{printable(self._places[0])}: no images in {len(shards)} tar shards{lost}; "
                f"looked for members that end in {', '.join([*EXTENSIONS, *ARRAY_EXTENSIONS])}"
            )
        # The first ones, not a sample of all: the others may be far away.
        first = [self._names[i] for i in range(min(SAMPLE, len(self)))]
        self.detect_form(printable(self._places[0]), first)
        if packed and self.form and len(packed.channel_names) == self.form.channels:
            self.channel_names = packed.channel_names

    def _data(self, i: int) -> bytes:
        size, at = int(self._size[i]), int(self._at[i])
        if size > MAX_BYTES:
            raise BadImageError(f"more than {MAX_BYTES} bytes")
        try:
            # Opened for each image: no state to share with, or to send to, another process.
            with open_to_read(self.files[self._chunk(i)], MAX_SHARD) as file:
                data = os.pread(file.fileno(), size, at)
        except OSError as error:
            raise BadImageError(error.strerror or type(error).__name__) from None
        if len(data) < size:
            raise BadImageError("the shard ends within this image")
        return data

    def name(self, i: int) -> str:
        return f"{self._file_names[self._chunk(i)]}/{printable(self._names[i])}"

    def _index(self, sizes: np.ndarray) -> dict[str, np.ndarray]:
        found = list[Shard]()
        with ThreadPoolExecutor(8) as pool, self.progress() as update:
            # Most of the time is spent waiting for the disk, or for remote shards.
            for shard in pool.map(lambda i: _samples(self.files[i]), range(len(self.files))):
                found.append(shard)
                update(len(found))
        if any(not _is_array(sample) for shard in found for sample in shard.samples):
            found = [_without_arrays(shard) for shard in found]
        # Samples that damage cut off from their labels are dropped, if all others are labelled.
        whole = [shard._replace(samples=shard.samples[: -shard.torn or None]) for shard in found]
        labels = [sample.label for shard in whole for sample in shard.samples]
        found = whole if labels and None not in labels else found
        samples = [sample for shard in found for sample in shard.samples]
        names = PackedPaths.pack([sample.name for sample in samples])
        known = [sample.label for sample in samples if sample.label is not None]
        pairs = zip(self._file_names, found, strict=True)
        lost = [f"{name}: {shard.problem}" for name, shard in pairs if shard.problem]
        digest = hashlib.sha256()
        for path, size, shard in zip(self._places, sizes, found, strict=True):
            digest.update(b"%b\0%d\n" % (os.fsencode(os.path.basename(path)), size))
            for sample in shard.samples:
                digest.update(b"%b\0%d\n" % (sample.name, sample.size))
        return {
            "names": names.text,
            "offsets": names.offsets,
            "at": np.array([sample.at for sample in samples], np.int64),
            "size": np.array([sample.size for sample in samples], np.int64),
            "label": np.array(known if len(known) == len(samples) else [], np.int64),
            "chunks": np.cumsum([0, *(len(shard.samples) for shard in found)]),
            "fingerprint": np.frombuffer(digest.hexdigest().encode(), np.uint8),
            "unreadable": np.frombuffer("\n".join(lost).encode(), np.uint8),
        }


def _samples(path: str) -> Shard:
    found, problem = list[Member](), ""
    key, images, label = (b"", b""), list[tuple[Member, bool]](), None
    arrays = list[Member]()

    def flush() -> None:
        chosen = [image for image, is_plain in images if is_plain][:1] or [m for m, _ in images]
        chosen = chosen or arrays[:1]  # beside a picture, an array is something else
        found.extend(image._replace(start=b"", label=label) for image in chosen)

    try:
        with open_to_read(path, MAX_SHARD) as file:
            for member in walk(file.fileno()):
                folder, _, base = member.name.rpartition(b"/")
                stem, _, extension = base.partition(b".")
                extension = extension.lower()
                if not stem:
                    continue  # hidden
                if (folder, stem) != key:
                    flush()
                    key, images, arrays, label = (folder, stem), [], [], None
                if extension.rpartition(b".")[2] in _PICTURES:
                    images.append((member, extension in _PICTURES))
                elif extension in _ARRAYS:
                    arrays.append(member)
                elif extension in (b"cls", b"json"):
                    is_json = extension == b"json"
                    label = _label(file.fileno(), member, is_json=is_json, known=label)
    except DamagedError as error:
        problem = str(error)
    except OSError as error:
        problem = error.strerror or type(error).__name__
    before = len(found)
    flush()
    return Shard(found, problem, len(found) - before if problem and label is None else 0)


def _is_array(sample: Member) -> bool:
    return sample.name.rpartition(b".")[2].lower() in _ARRAYS


def _without_arrays(shard: Shard) -> Shard:
    """`shard` without its arrays: among pictures, they are not images."""
    torn = sum(not _is_array(sample) for sample in shard.samples[len(shard.samples) - shard.torn :])
    return shard._replace(samples=[s for s in shard.samples if not _is_array(s)], torn=torn)


def _label(file: int, member: Member, *, is_json: bool, known: int | None) -> int | None:
    data = member.start[: member.size]
    if member.size > BLOCK:
        data = os.pread(file, min(member.size, MAX_RECORD), member.at)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return known
    if is_json and isinstance(value, dict):
        value = value.get("label", value.get("cls"))
    return value if type(value) is int and -(2**63) <= value < 2**63 else known


def walk(file: int) -> Iterator[Member]:
    """Yields the regular members of a tar archive: POSIX ustar and pax, and GNU.

    Raises `DamagedError` at anything it cannot parse, and where the end mark is missing.
    """
    end = os.fstat(file).st_size
    at, name, size = 0, b"", -1  # name and size: as given by a preceding header
    sparse = False
    held, begin = b"", 0  # bytes read last, and their offset
    for _ in range(MAX_MEMBERS):
        if not begin <= at <= begin + len(held) - 2 * BLOCK:
            held, begin = os.pread(file, AHEAD, at), at
        header = held[at - begin : at - begin + BLOCK]
        start = held[at - begin + BLOCK : at - begin + 2 * BLOCK]
        if not header.strip(b"\0") and len(header) == BLOCK:
            return
        if len(header) < BLOCK:
            raise DamagedError(f"cut at byte {end}")
        if _number(header[148:156]) != sum(header) - sum(header[148:156]) + 8 * ord(" "):
            raise DamagedError(f"broken header at byte {at}")
        kind, at = header[156:157], at + BLOCK
        if size < 0:
            size = 0 if kind in _WITHOUT_DATA else _number(header[124:136])
        if kind == b"S":  # GNU sparse: maps of holes may follow in further blocks
            more = header[482]
            while more and at < end:
                more = os.pread(file, BLOCK, at)[504:505] == b"\1"
                at += BLOCK
        if not 0 <= size <= end - at:
            raise DamagedError(f"member at byte {at} is cut, or lies about its size")
        here, at = at, at + -(-size // BLOCK) * BLOCK
        if kind in (b"L", b"x", b"X"):
            if size > (MAX_NAME if kind == b"L" else MAX_RECORD):
                raise DamagedError(f"{size} bytes of header at byte {here}")
            data, size = os.pread(file, size, here), -1
            if kind == b"L":
                name = data.rstrip(b"\0")
                continue
            records = _pax(data)
            name = records.get(b"path", name)
            sparse = any(key.startswith(b"GNU.sparse") for key in records)
            if (given := records.get(b"size", b"")).isdigit():
                size = int(given[:20])
            continue
        if kind in (b"g", b"K"):
            size = -1
            continue
        if kind in (b"0", b"\0", b"7") and not sparse:
            if not name:
                name = header[:100].partition(b"\0")[0]
                if header[257:263] == b"ustar\0" and header[345]:
                    name = header[345:500].partition(b"\0")[0] + b"/" + name
            if not name.endswith(b"/"):  # which is a folder, in the oldest format
                yield Member(name[:MAX_NAME], here, size, start)
        name, size, sparse = b"", -1, False
    raise DamagedError(f"more than {MAX_MEMBERS} members")


def _number(field: bytes) -> int:
    """A number in a header: octal digits or, with the first bit set, base 256; else -1."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    try:
        return int(field.strip(b" \0") or b"0", 8)
    except ValueError:
        return -1


def _pax(data: bytes) -> dict[bytes, bytes]:
    """Parses records of the form ``<length> <key>=<value>\\n``."""
    records, at, data = {}, 0, data.rstrip(b"\0")
    while at < len(data):
        digits, _, _ = data[at : at + 10].partition(b" ")
        length = int(digits) if digits.isdigit() else 0
        if not len(digits) + 1 < length <= len(data) - at:
            raise DamagedError("broken pax header")
        key, _, value = data[at + len(digits) + 1 : at + length - 1].partition(b"=")
        records[key], at = value, at + length
    return records


def _open(text: str, split: Split | None) -> Tar:
    if text.lower().endswith(COMPRESSED):
        raise DataError(
            f"{printable(text)}: a compressed tar has no random access, and images are compressed "
            f"already; decompress it"
        )
    return Tar(find_shards(text, ".tar", split))


TAR = Source(
    "tar",
    _open,
    suffix=".tar",
    recognise=lambda text: names_shards(text, ".tar") or text.lower().endswith(COMPRESSED),
)
