"""Sizes of the pages of a Parquet file, by their own headers: the footer may say anything.

A page is unpacked whole, to the size that its header states, and to as many values: a few bytes can
say a hundred million times that there is none. These headers are structs of Thrift's compact
protocol, of which only integers are kept.
"""

from collections.abc import Iterable, Iterator
from typing import IO, Any

from stopmim.base.files import open_to_read
from stopmim.data.decode import BadImageError
from stopmim.data.sources.source import MAX_SHARD

MOST_NESTED = 8  # structs and lists in a header
UNPACKED, PACKED = 2, 3  # fields of a header: bytes of the page
OF_DATA = 5, 8  # fields of a header, too: what it says of a page of data, of version 1 or 2
VALUES = 1  # the field of these with their number
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 12
_INTEGERS = 4, 5, 6


def unpacked(path: str, chunks: Iterable[tuple[Any, int]]) -> tuple[int, int]:
    """Bytes of all pages of these columns of row groups, unpacked, and of the largest of them.

    Beside each column stands its number of rows, which its pages must not exceed.
    """
    total, largest = 0, 0
    with open_to_read(path, MAX_SHARD) as file:
        for chunk, rows in chunks:
            found = 0
            for size, values in _pages(file, chunk):
                total, largest, found = total + size, max(largest, size), found + values
                if found > rows:
                    raise BadImageError(f"pages of {found} values in a row group of {rows} rows")
    return total, largest


def _pages(file: IO[bytes], chunk: Any) -> Iterator[tuple[int, int]]:
    """Bytes and values of each page."""
    at = chunk.data_page_offset
    if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < at:
        at = chunk.dictionary_page_offset
    end = at + chunk.total_compressed_size
    while 0 <= at < end:
        file.seek(at)
        found = _struct(file, MOST_NESTED)
        sizes = [found.get((field,), -1) for field in (UNPACKED, PACKED)]
        values = [found.get((field, VALUES), 0) for field in OF_DATA]
        if min(*sizes, *values) < 0:
            raise BadImageError("a page without a size")
        yield sizes[0], max(values)
        at = file.tell() + sizes[1]


def _struct(file: IO[bytes], depth: int) -> dict[tuple[int, ...], int]:
    """The integers of a struct, and of structs in it, by the numbers of their fields."""
    found, number = dict[tuple[int, ...], int](), 0
    while (head := _byte(file)) & 15:
        number = number + (head >> 4) if head >> 4 else _integer(file)
        value = _value(file, head & 15, depth)
        found |= {(number, *field): integer for field, integer in value.items()}
    return found


def _value(file: IO[bytes], kind: int, depth: int) -> dict[tuple[int, ...], int]:
    """The integer under (), or those of a struct; nothing of what is skipped."""
    if kind in _INTEGERS:
        return {(): _integer(file)}
    if kind in (_TRUE, _FALSE):
        return {}
    if kind in (_BYTE, _DOUBLE):
        file.seek(1 if kind == _BYTE else 8, 1)
    elif kind == _BINARY:
        file.seek(_varint(file), 1)
    elif kind == _STRUCT and depth:
        return _struct(file, depth - 1)
    elif kind in (_LIST, _SET) and depth:
        head = _byte(file)
        for _ in range(_varint(file) if head >> 4 == 15 else head >> 4):
            # In a list, unlike in a struct, a truth value takes a byte.
            inner = _BYTE if head & 15 in (_TRUE, _FALSE) else head & 15
            _value(file, inner, depth - 1)
    else:
        raise BadImageError("a page whose header is damaged")
    return {}


def _integer(file: IO[bytes]) -> int:
    value = _varint(file)
    return (value >> 1) ^ -(value & 1)


def _varint(file: IO[bytes]) -> int:
    value = 0
    for shift in range(0, 63, 7):
        byte = _byte(file)
        value |= (byte & 127) << shift
        if byte < 128:
            return value
    raise BadImageError("a page whose header is damaged")


def _byte(file: IO[bytes]) -> int:
    if not (byte := file.read(1)):
        raise BadImageError("ends within its pages")
    return byte[0]
