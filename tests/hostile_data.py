"""Hostile data: folders of images, archives, tables, lists, layouts of data sets, and videos."""

import io
import json
import os
import pickle
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import hostile_arrays
from hostile_weights import Code, Write, link, overlapping, sparse
from tiny import NoiseImages

DIGITS = b"1" * 5000
JUST_BELOW = 9459  # its square is just below the limit of pixels


def data() -> dict[str, dict[str, Write]]:
    """Kind to name to writer."""
    lists = {f"{kind} list": _lists(kind) for kind in ("skip", "name")}
    sources = _folders() | _archives() | _tables() | _tars() | _image_lists() | _layouts()
    sources |= hostile_arrays.folders() | hostile_arrays.archives() | hostile_arrays.tables()
    return {"data": sources, "videos": _videos(), **lists}


def encoded(pixels: np.ndarray, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind, **options)
    return buffer.getvalue()


@cache
def small() -> tuple[bytes, ...]:
    """Good images, enough for a batch."""
    return tuple(encoded(image, "PNG") for image in NoiseImages(24).images)


# ------------------------------------------------------------------------------ image files


def scans(count: int, side: int = 4000) -> bytes:
    """A progressive JPEG of `count` scans, each of which is one more pass over all pixels."""
    good = encoded(np.zeros((side, side, 3), np.uint8), "JPEG", progressive=True)
    last = good.rindex(b"\xff\xda")
    table = good.rindex(b"\xff\xc4", 0, last)  # the Huffman table of the scan comes with it
    return good[:-2] + good[table:-2] * (count - 10) + good[-2:]


def huge(kind: str, mode: str = "RGB", **options: Any) -> Callable[[], bytes]:
    """An image of one colour, just below the limit of pixels."""

    def make() -> bytes:
        buffer = io.BytesIO()
        Image.new(mode, (JUST_BELOW, JUST_BELOW)).save(buffer, kind, **options)
        return buffer.getvalue()

    return make


def _black(side: int, mode: str = "RGB", value: int = 0) -> Callable[[], bytes]:
    """A square picture of one colour."""
    kind = "JPEG" if mode == "RGB" else "PNG"
    return lambda: encoded(np.array(Image.new(mode, (side, side), value)), kind)


def png_of(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG that claims this size, with other chunks before an end without pixels."""
    about = struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)
    every = [(b"IHDR", about), *chunks, (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(d)) + name + d + struct.pack(">I", zlib.crc32(name + d))
        for name, d in every
    )


def pages(count: int) -> bytes:
    """A TIFF of as many pages, which share their pixels."""
    size, pixels = 2 + 9 * 12 + 4, 8 + count * (2 + 9 * 12 + 4)
    tags = [(256, 8), (257, 8), (258, 8), (259, 1), (262, 1), (273, pixels), (277, 1), (278, 8)]
    table = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in [*tags, (279, 64)])
    links = [*range(8 + size, pixels, size), 0]
    every = (b"\x09\0" + table + struct.pack("<I", link) for link in links)
    return b"II*\0\x08\0\0\0" + b"".join(every) + bytes(64)


def deflated_dicom() -> bytes:
    """Gigabytes of zeros, deflated, as the header says behind an element of 2,000 bytes."""
    values = {2: b"1.2.3\0", 3: b"1.2.3".ljust(2000, b"\0"), 16: b"1.2.840.10008.1.2.1.99"}
    header = b"".join(
        struct.pack("<HH2sH", 2, number, b"UI", len(value)) + value
        for number, value in values.items()
    )
    length = struct.pack("<HH2sHI", 2, 0, b"UL", 4, len(header))
    squeeze = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = squeeze.compress(bytes(2**24)) + squeeze.flush(zlib.Z_FULL_FLUSH)
    return bytes(128) + b"DICM" + length + header + block * 128


@cache
def images() -> Mapping[str, bytes | Callable[[], bytes]]:
    """Single image files by name."""
    bomb = zlib.compress(bytes(200_000_000), 9)
    return {
        "400 scans.jpg": lambda: scans(400),
        "60 scans.jpg": lambda: scans(60),
        "huge.png": huge("PNG"),
        "huge with alpha.png": huge("PNG", "RGBA"),
        "huge palette.png": huge("PNG", "P"),
        "huge grey.png": huge("PNG", "I;16"),
        "huge.jpg": huge("JPEG"),
        "huge progressive.jpg": huge("JPEG", progressive=True, subsampling=0),
        "huge.webp": huge("WEBP", lossless=True, quality=0, method=0),
        "huge.gif": huge("GIF", "P"),
        "huge.tif": huge("TIFF", compression="tiff_deflate"),
        "huge float.tif": huge("TIFF", "F", compression="tiff_deflate"),
        "over the limit.png": png_of(100_000, 100_000),
        "beyond 32 bits.png": png_of(2**31 - 1, 2**31 - 1),
        "comment.png": png_of(8, 8, (b"zTXt", b"a\0\0" + bomb)),
        "profile.png": png_of(8, 8, (b"iCCP", b"a\0\0" + bomb)),
        "no pixels.png": png_of(0, 0),
        "postscript.jpg": b"%!PS-Adobe-3.0 EPSF-3.0\n(%pipe%touch canary) (w) file\n",
        "text.jpg": b"hello",
        "ppm.ppm": b"P6 99999999 99999999 255\n",
        "digits.ppm": b"P6 " + DIGITS + b" 1 255\n",
        "gif.gif": b"GIF89a\xff\xff\xff\xff\x80\0\0" + bytes(6) + b",\0\0\0\0\xff\xff\xff\xff\0\2",
        "tiff.tif": b"II*\0\x08\0\0\0\xff\xff" + b"\xff" * 400,
        "pages.tif": lambda: pages(100_000),
        "loop.tif": b"II*\0\x08\0\0\0\0\0\x08\0\0\0",
    }


def _folders() -> dict[str, Write]:
    def folder(
        name: str, content: bytes | Callable[[], bytes] | None, write: Write | None
    ) -> Write:
        def make(path: Path) -> None:
            for i, image in enumerate(small()):
                (path / f"c{i % 2}").mkdir(parents=True, exist_ok=True)
                (path / f"c{i % 2}" / f"{i:02}.png").write_bytes(image)
            place = path / "c0" / name
            if write:
                write(place)
            elif content is not None:
                place.write_bytes(content if isinstance(content, bytes) else content())

        return make

    found = {f"images with {k}": folder(k, data, None) for k, data in images().items()}
    places: dict[str, tuple[str, Write]] = {
        "a pipe": ("p.png", os.mkfifo),
        "endless zeros": ("z.png", link("/dev/zero")),
        "a terabyte": ("t.png", sparse(2**40)),
        "a loop": ("l.png", link("l.png")),
        "a folder above": ("up", link("..")),
        "a name of lines": ("a\nstopmim: error: forged\x1b[2J.png",
                            lambda path: path.write_bytes(b"x")),
        "a folder called like an image": ("d.png", lambda path: path.mkdir()),
    }  # fmt: skip
    found |= {f"images with {k}": folder(name, None, w) for k, (name, w) in places.items()}
    array = {"zarr_format": 2, "shape": [20_000, 20_000], "chunks": [1, 1], "dtype": "|u1",
             "compressor": None, "filters": None, "fill_value": 0, "order": "C"}  # fmt: skip
    about = json.dumps(array).encode()
    large = json.dumps(array | {"shape": [2**20] * 2, "chunks": [4096] * 2}).encode()
    found["arrays of 2 ** 40 pixels"] = _tree({"0.zarr/.zarray": large})
    found["arrays of tiny chunks"] = _tree({f"{i}.zarr/.zarray": about for i in range(4)})
    found["a deflated DICOM"] = _tree({"a.dcm": lambda path: path.write_bytes(deflated_dicom())})
    return found | {"f" * 300: lambda path: None, "no images": lambda path: path.mkdir()}


# ------------------------------------------------------------------------------ archives


def npy(shape: str, dtype: str = "'|u1'", content: bytes = b"") -> bytes:
    text = f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\0" + struct.pack("<H", len(text)) + text + content


def archive(files: Mapping[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as out:
        for name, content in files.items():
            out.writestr(name, content)
    return buffer.getvalue()


def _archives() -> dict[str, Write]:
    good = npy("(24, 8, 8, 3)", content=bytes(24 * 8 * 8 * 3))
    stored = archive({"images.npy": good})
    names = [b"PK\3\4", b"PK\1\2"]

    def patched(offset: int, value: bytes, data: bytes = stored) -> bytes:
        """Both headers of the record with `value` at `offset` of what follows the version."""
        for name, extra in zip(names, (4, 6), strict=True):
            at = data.index(name) + extra + offset
            data = data[:at] + value + data[at + len(value) :]
        return data

    lzma = archive({"images.npy": good}, zipfile.ZIP_LZMA)
    contents: dict[str, bytes | Callable[[], bytes]] = {
        "of an absurd shape": archive({"images.npy": npy("(1000000, 100000, 100000, 3)")}),
        "of a large shape": archive({"images.npy": npy("(200, 4096, 4096, 3)")}),
        "of a shape beyond 64 bits": archive({"images.npy": npy("(2**70, 8, 8, 3)")}),
        "of a shape of 30 digits": archive({"images.npy": npy("(1" + "0" * 30 + ", 8, 8, 3)")}),
        "of a shape below zero": archive({"images.npy": npy("(-1, 8, 8, 3)")}),
        "of a shape of text": archive({"images.npy": npy("('a',)")}),
        "of code": archive({"images.npy": npy("__import__('os').system('touch canary')")}),
        "of objects": archive({"images.npy": npy("(1,)", "'|O'", pickle.dumps(Code()))}),
        "of unknown type": archive({"images.npy": npy("(1,)", "'|x9'")}),
        "of a long header": archive({"images.npy": npy("(" + "1," * 15_000 + ")")}),
        "of nothing": archive({}),
        "of text": b"hello",
        "encrypted": patched(2, b"\1\0"),
        "of unknown method": patched(4, b"\x63\0"),
        "of damaged LZMA": lzma[:60] + bytes(40) + lzma[100:],
        "of BZIP2 that is none": patched(4, b"\x0c\0"),
        "cut": stored[: len(stored) // 2],
        "of a wrong sum": stored.replace(bytes(100), b"\1" * 100, 1),
        "that expands": lambda: archive(
            {"images.npy": npy("(14, 4096, 4096, 3)", content=bytes(14 * 3 * 2**24))},
            zipfile.ZIP_DEFLATED,
        ),
        "of overlapping entries": lambda: overlapping(60_000, 4_000_000),
        "of many arrays": lambda: archive({f"a{i}.npy": npy("(0,)") for i in range(60_000)}),
        "of names of lines": archive({"a\nstopmim: error: b.npy": npy("(0,)")}),
        "that is a pickle": pickle.dumps(Code()),
    }
    found: dict[str, Write] = {f"npz {k}.npz": partial(_write, v) for k, v in contents.items()}
    return found | {
        "npz in a pipe.npz": os.mkfifo,
        "endless npz.npz": link("/dev/zero"),
        "npz of a terabyte.npz": sparse(2**40, b"PK\3\4"),
    }


def _write(content: bytes | Callable[[], bytes], path: Path) -> None:
    path.write_bytes(content if isinstance(content, bytes) else content())


# ------------------------------------------------------------------------------ Parquet


def parquet(make: Callable[[Any], Any], **options: Any) -> Callable[[], bytes]:
    def content() -> bytes:
        import pyarrow
        import pyarrow.parquet

        buffer = io.BytesIO()
        pyarrow.parquet.write_table(make(pyarrow), buffer, **options)
        return buffer.getvalue()

    return content


def nulls(rows: int) -> Callable[[], bytes]:
    """As many rows, all null, in a small file, written piece by piece."""

    def content() -> bytes:
        import pyarrow as pa
        import pyarrow.parquet

        kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        schema, buffer, piece = (
            pa.schema([("image", kind), ("label", pa.int64())]),
            io.BytesIO(),
            10**6,
        )
        with pa.parquet.ParquetWriter(buffer, schema) as writer:
            part = pa.table(
                [pa.nulls(piece, kind), pa.array(np.zeros(piece, np.int64))], schema=schema
            )
            for _ in range(rows // piece):
                writer.write_table(part, row_group_size=piece)
        return buffer.getvalue()

    return content


def _rows(arrow: Any, **columns: Any) -> Any:
    rows = [{"bytes": image, "path": "x"} for image in small()]
    return arrow.table({"image": rows, "label": [i % 2 for i in range(len(rows))], **columns})


def _duplicate(arrow: Any) -> Any:
    table = _rows(arrow)
    return table.append_column("label", table.column("label")).append_column(
        "image", table.column("image")
    )


def _nested(depth: int) -> Callable[[Any], Any]:
    def make(arrow: Any) -> Any:
        kind = arrow.int8()
        for _ in range(depth):
            kind = arrow.struct([("a", kind)])
        return _rows(arrow).append_column("deep", arrow.nulls(24, kind))

    return make


def _repeated(arrow: Any) -> Any:
    """A megabyte in a dictionary, as the image of 20,000 rows."""
    rows = arrow.DictionaryArray.from_arrays(np.zeros(20_000, np.int32), [bytes(10**6)])
    return arrow.table({"image": arrow.StructArray.from_arrays([rows], ["bytes"])})


def _described(text: bytes) -> Callable[[Any], Any]:
    return lambda arrow: _rows(arrow).replace_schema_metadata({b"huggingface": text})


def _tables() -> dict[str, Write]:
    good = parquet(_rows)
    contents: dict[str, bytes | Callable[[], bytes]] = {
        "of 120 million nulls": nulls(120_000_000),
        "of the same column twice": parquet(_duplicate),
        "of nested columns": parquet(_nested(200)),
        "of deep metadata": parquet(_described(b"[" * 100_000)),
        "of metadata of digits": parquet(_described(b'{"info": ' + DIGITS + b"}")),
        "of names that are numbers": parquet(
            _described(b'{"info": {"features": {"label": {"names": 3, "_type": "ClassLabel"}}}}')
        ),
        "of metadata of megabytes": parquet(_described(b"x" * 5_000_000)),
        "without images": parquet(lambda arrow: arrow.table({"a": [1]})),
        "of no rows": parquet(lambda arrow: _rows(arrow).slice(0, 0)),
        "of columns of lines": parquet(
            lambda arrow: arrow.table({"a\nstopmim: error: forged": [1]})
        ),
        "of many columns": parquet(
            lambda arrow: _rows(arrow, **{f"c{i}": [0] * 24 for i in range(3_000)})
        ),
        "of repeated bytes": parquet(
            lambda arrow: arrow.table({"image": [{"bytes": bytes(10**6), "path": ""}] * 700}),
            compression="snappy", use_dictionary=False, row_group_size=700,
        ),
        "of one image for all rows": parquet(
            _repeated, use_dictionary=True, dictionary_pagesize_limit=2**30, store_schema=False
        ),
        "cut": lambda: good()[: len(good()) // 2],
        "of a broken footer": lambda: good()[:-30] + bytes(22) + good()[-8:],
        "of a footer of gigabytes": b"PAR1" + bytes(100) + struct.pack("<I", 2**31 - 1) + b"PAR1",
        "of text": b"hello",
    }  # fmt: skip
    found: dict[str, Write] = {
        f"table {k}.parquet": partial(_write, v) for k, v in contents.items()
    }
    return found | {
        "table in a pipe.parquet": os.mkfifo,
        "endless table.parquet": link("/dev/zero"),
        "table of a terabyte.parquet": sparse(2**40, b"PAR1"),
    }


# ------------------------------------------------------------------------------ tar


def shard(*members: tuple[str, bytes], **about: Any) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(
        fileobj=buffer, mode="w", format=about.get("format", tarfile.GNU_FORMAT)
    ) as t:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            t.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def header(name: bytes, size: int, kind: bytes = b"0") -> bytes:
    """A tar header with a right checksum."""
    text = name.ljust(100, b"\0") + b"0000644\0" * 3 + b"%011o\0" % size + b"0" * 11 + b"\0"
    rest = kind + bytes(100) + b"ustar\00000" + bytes(247)
    total = sum(text) + sum(rest) + 8 * ord(" ")
    return text + b"%06o\0 " % total + rest


def _tars() -> dict[str, Write]:
    images = [(f"{i:03}.png", image) for i, image in enumerate(small())]
    records = b"".join(b"6 a=b\n" for _ in range(170_000))
    pax = header(b"x", len(records), b"x") + records + bytes(-len(records) % 512)
    contents: dict[str, bytes | Callable[[], bytes]] = {
        "that lies about sizes": header(b"a.png", 8**11 - 1) + bytes(1024),
        "of records": lambda: pax * 3 + shard(*images),
        "of a long record": header(b"x", 2**20 + 1, b"x") + bytes(2**20 + 1024),
        "of a record of digits": header(b"x", 5010, b"x") + DIGITS.ljust(5120, b" "),
        "of links": lambda: shard(*images)[:-10240] + header(b"l.png", 0, b"2") + bytes(1024),
        "of empty images": lambda: shard(*((f"{i}.png", b"") for i in range(20_000))),
        "of deep labels": shard(*images, ("023.json", b"[" * 100_000)),
        "of labels of digits": shard(*images, ("023.cls", DIGITS)),
        "of infinite labels": shard(*images, ("023.json", b'{"label": Infinity}')),
        "of names of lines": shard(("a\nstopmim: error: b\x1b[2J.png", b"x"), *images),
        "of paths above": shard(("../../../x.png", b"x"), *images),
        "cut": lambda: shard(*images)[:9000],
        "of text": b"hello" * 300,
        "of zeros": bytes(10_240),
    }
    found: dict[str, Write] = {f"shard {k}.tar": partial(_write, v) for k, v in contents.items()}
    return found | {
        "shard in a pipe.tar": os.mkfifo,
        "endless shard.tar": link("/dev/zero"),
        "shard of a terabyte.tar": sparse(2**40, header(b"a.txt", 10)),
        "shard compressed.tar.gz": lambda path: path.write_bytes(b"\x1f\x8b"),
    }


# ------------------------------------------------------------------------------ lists


def _list_files() -> dict[str, Write]:
    """Places and texts that are no list of anything."""
    return {
        "in a pipe": os.mkfifo,
        "endless": link("/dev/zero"),
        "of a terabyte": sparse(2**40),
        "that is a folder": lambda path: path.mkdir(),
        "that is empty": partial(_write, b""),
        "of bytes": partial(_write, bytes(range(128, 256)) * 10),
        "of zero bytes": partial(_write, b"a\0b.png\n"),
        "of megabytes": partial(_write, b"x" * 5_000_000),
    }


def _image_lists() -> dict[str, Write]:
    def beside(content: bytes) -> Write:
        def make(path: Path) -> None:
            path.write_bytes(content)

        return make

    one = b"images/part0/000.png"
    contents = {
        "of devices": b"/dev/zero\n",
        "of devices by a detour": b"images/../../../../../dev/zero,1\n",
        "of missing files": b"nowhere.png\n",
        "of the same": one + b"\n" + one + b"\n",
        "of labels of digits": one + b"," + DIGITS + b"\n",
        "of lines of megabytes": one + b"," + b"x" * 3_000_000 + b"\n",
        "of long names": b"n" * 300 + b".png\n",
        "of fields": b'"' + one + b'","' + b"x" * 200_000 + b"\n",
        "of uneven rows": b"path,label\n" + one + b",1,2\n",
        "of surrogates": b"\xed\xa0\x80.png\n",
        "of escapes": b"a\x1b[2J\x07.png\n",
        "of a million lines": b"nowhere.png,1\n" * 300_000,
    }
    found: dict[str, Write] = {f"list {k}.txt": beside(v) for k, v in contents.items()}
    return found | {f"list {k}.txt": write for k, write in _list_files().items()}


def _lists(kind: str) -> dict[str, Write]:
    """Lists for --data.skip and --skip, or for --list."""
    suffix = "jsonl" if kind == "skip" else "txt"
    found = {f"{kind} list {k}.{suffix}": write for k, write in _list_files().items()}
    if kind == "skip":
        del found["skip list that is empty.jsonl"]  # that is one
        texts = {
            "of deep lines": b"[" * 100_000 + b"\n",
            "of digits": b'{"name": ' + DIGITS + b"}\n",
            "of numbers": b"3\n",
            "of surrogates": b'{"name": "\\ud800"}\n',
            "of strangers": b'{"name": "nowhere"}\n',
        }
    else:
        texts = {"of strangers": b"nowhere.png\n", "of lines": b"a\x1b[2J\n", "of digits": DIGITS}
    return found | {f"{kind} list {k}.{suffix}": partial(_write, v) for k, v in texts.items()}


# ------------------------------------------------------------------------------ layouts


def _layouts() -> dict[str, Write]:
    def clevr(content: bytes | Write) -> Write:
        return _tree({"scenes/CLEVR_train_scenes.json": content})

    def inat(content: bytes | Write) -> Write:
        return _tree({"train2018.json": content})

    def cifar(content: bytes | Write) -> Write:
        return _tree({"train": content, "test": content, "meta": content})

    scene = {"image_filename": "a.png", "objects": [{"pixel_coords": [0, 0, 9.0]}]}

    def scenes(**changes: Any) -> bytes:
        return json.dumps({"scenes": [scene | changes]}).encode()

    def species(name: object) -> bytes:
        return json.dumps({"images": [{"file_name": name}]}).encode()

    texts: dict[str, bytes | Write] = {
        "nested lists": b"[" * 100_000,
        "nonsense": b"\xff{",
        "a list": b"[]",
        "digits": DIGITS,
        "a pipe": os.mkfifo,
        "endless zeros": link("/dev/zero"),
        "a terabyte": sparse(2**40),
    }
    chain = b"".join(b"q%c0h%ch%c\x86" % (i, i, i) for i in range(60))  # 2 ** 60 of the same
    pickles: dict[str, bytes | Write] = {
        "code": pickle.dumps(Code(), protocol=2),
        "marks": b"\x80\x02" + b"(" * 300_000 + b"t" * 300_000 + b".",
        "keys of tuples": b"\x80\x02})" + chain + b"K\x01s.",
        "names of tuples": b"\x80\x02}U\x10fine_label_names)" + chain + b"s.",
        "built tuples": b"\x80\x02)" + chain + b")b.",
        "lists of themselves": b"\x80\x02}U\x0bfine_labels]q\x00(" + b"h\x00" * 1000 + b"es.",
        "digits": b"\x80\x02I" + DIGITS + b"\n.",
        "strings of gigabytes": b"\x80\x02T\xff\xff\xff\x7fabc.",
        "zeros": bytes(1000),
    }
    return {
        **{f"clevr of {k}": clevr(v) for k, v in texts.items()},
        **{f"inat of {k}": inat(v) for k, v in texts.items()},
        "clevr of a surrogate": clevr(scenes(image_filename="\ud800")),
        "clevr of a zero byte": clevr(scenes(image_filename="a\0")),
        "clevr of infinite depth": clevr(scenes(objects=[{"pixel_coords": [0, 0, 10**400]}])),
        "clevr of no objects": clevr(scenes(objects=[])),
        "clevr of paths above": clevr(scenes(image_filename="../../../x.png")),
        "clevr of long names": clevr(scenes(image_filename="n" * 300)),
        "clevr of names of lines": clevr(scenes(image_filename="a\nstopmim: error: b\x1b[2J")),
        "inat of a surrogate": inat(species("a/b/\ud800/c.jpg")),
        "inat of a zero byte": inat(species("a/b/c/\0.jpg")),
        "inat of a short path": inat(species("a.jpg")),
        "inat of numbers": inat(species(3)),
        "inat of megabytes": inat(species("a/b/" + "c" * 3_000_000 + "/d.jpg")),
        **{f"cifar of {k}": cifar(v) for k, v in pickles.items()},
        "cifar of a pipe": _tree({"train": b"", "test": b"", "meta": b"", "train.bin": os.mkfifo}),
        "cifar of a terabyte": _tree({"train.bin": sparse(2**40), "test.bin": b"x"}),
        "cifar of endless zeros": cifar(link("/dev/zero")),
        "cifar of names of a terabyte": _tree(
            {
                "train.bin": bytes(3074 * 24),
                "test.bin": bytes(3074 * 24),
                "fine_label_names.txt": sparse(2**40),
            }
        ),
    }


def _tree(files: Mapping[str, bytes | Write]) -> Write:
    def make(path: Path) -> None:
        for name, content in files.items():
            place = path / name
            place.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                place.write_bytes(content)
            else:
                content(place)

    return make


# ------------------------------------------------------------------------------ videos


def _videos() -> dict[str, Write]:
    """Folders of DAVIS 2017."""
    frame, mask = (
        encoded(NoiseImages(1).images[0], "JPEG"),
        encoded(np.eye(28, 32, dtype=np.uint8), "PNG"),
    )
    names = ("ImageSets/2017/val.txt", "JPEGImages/480p/a/{}.jpg", "Annotations/480p/a/{}.png")

    def davis(**changes: Any) -> Write:
        """The frame and mask are those of the second frame only, or of all."""
        everywhere = changes.pop("first", False)
        files: dict[str, bytes | Write] = {names[0]: changes.pop("list", b"a\n")}
        for i in range(3):
            given = changes.get("frame", frame), changes.get("mask", mask)
            for name, content, usual in zip(names[1:], given, (frame, mask), strict=True):
                files[name.format(f"{i:05}")] = content if everywhere or i == 1 else usual
        return _tree(files)

    def pixels(content: Callable[[], bytes]) -> Write:
        return partial(_write, content)

    lists: dict[str, bytes | Write] = {
        "a pipe": os.mkfifo,
        "endless zeros": link("/dev/zero"),
        "a terabyte": sparse(2**40),
        "bytes": bytes(range(128, 256)),
        "nothing": b"\n",
        "paths above": b"../../../../../etc\n",
        "long names": b"n" * 300 + b"\n",
        "zero bytes": b"a\0b\n",
        "lines": b"x\x1b[2J\x07\n",
        "megabytes": b"x" * 5_000_000,
    }
    return {
        **{f"videos in a list of {k}": davis(list=v) for k, v in lists.items()},
        "videos with a frame of text": davis(frame=b"hello"),
        "videos with an endless frame": davis(frame=link("/dev/zero")),
        "videos with a frame in a pipe": davis(frame=os.mkfifo),
        "videos with a huge frame": davis(frame=pixels(huge("JPEG"))),
        "videos with a frame of 400 scans": davis(frame=pixels(lambda: scans(400))),
        "videos with a frame of another size": davis(
            frame=encoded(np.zeros((40, 16, 3), np.uint8), "JPEG")
        ),
        "videos with a mask of text": davis(mask=b"hello"),
        "videos with an endless mask": davis(mask=link("/dev/zero")),
        "videos with a mask in a pipe": davis(mask=os.mkfifo),
        "videos with a huge mask": davis(mask=pixels(huge("PNG", "L"))),
        "videos with as many objects as pixels": davis(
            list=b"a\n", frame=pixels(_black(2048)), mask=pixels(_black(2048, "L", 254)), first=True
        ),
        "videos of long frames": davis(
            frame=encoded(np.zeros((1, 60_000, 3), np.uint8), "JPEG"),
            mask=encoded(np.ones((1, 60_000), np.uint8), "PNG"),
            first=True,
        ),
        "videos with a mask over the limit": davis(mask=png_of(100_000, 100_000)),
        "videos with a mask in colour": davis(mask=encoded(NoiseImages(1).images[0], "PNG")),
        "videos with a mask of another size": davis(
            mask=encoded(np.eye(16, 40, dtype=np.uint8), "PNG")
        ),
        "v" * 300: lambda path: None,
        "videos of nothing": lambda path: path.mkdir(),
    }
