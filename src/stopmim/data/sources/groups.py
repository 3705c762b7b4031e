"""Files of one channel each, grouped to images by a pattern of their names.

FOLDER@{name}_{channel}.tif takes every file below FOLDER whose path ends like the pattern: files
with equal `{name}`, in one folder, are the channels of one image. `{channel}` alone means all
channels that occur, sorted; `{channel:DAPI,GFP}` means these, in this order.
"""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from stopmim.base.errors import DataError
from stopmim.data.channels import MOST as MAX_CHANNELS
from stopmim.data.crops import Box
from stopmim.data.decode import BadImageError
from stopmim.data.images import stamp_files
from stopmim.data.rasters.open import ARRAYS, open_raster
from stopmim.data.rasters.raster import Raster, check_shape
from stopmim.data.rasters.windows import read_whole
from stopmim.data.sources.folder import Files, file_sizes, has_splits, hash_files, split_folder
from stopmim.data.sources.scanning import SUFFIXES, path_classes, scan
from stopmim.data.sources.source import PackedPaths, Source, Split, printable, refuse_split

_FIELD = re.compile(r"\{(name|channel)(?::([^{}]+))?\}")


class Groups(Files):
    """Images whose channels are files of their own; those that lack one are `unreadable`."""

    def __init__(self, root: Path | str, pattern: str, classes: Sequence[str] = ()) -> None:
        self._set_root(root)
        name = printable(f"{root}@{pattern}")
        matched, listed = parse_pattern(pattern)
        groups: dict[bytes, dict[str, bytes]] = defaultdict(dict)
        self.unreadable: list[str] = []
        for path in scan(self._root, {}, self.unreadable, Counter(), (*SUFFIXES, *ARRAYS)):
            if found := matched.fullmatch(os.fsdecode(path)):
                image = os.fsencode((found["folder"] or "") + found["name"])
                groups[image][found["channel"]] = path
        self.channel_names = listed or sorted({c for group in groups.values() for c in group})
        if not 0 < len(self.channel_names) <= MAX_CHANNELS:
            raise DataError(
                f"{name}: {len(self.channel_names)} channels in {len(groups)} images; expected up "
                f"to {MAX_CHANNELS}: does the pattern fit the names of the files?"
            )
        missing = {
            image: [c for c in self.channel_names if c not in groups[image]]
            for image in sorted(groups)
        }
        whole = [image for image, lacks in missing.items() if not lacks]
        lacking = [
            f"{printable(i)}: no file of {lacks[0]}" for i, lacks in missing.items() if lacks
        ]
        if not whole:
            raise DataError(
                f"{name}: no image has all of the channels {', '.join(self.channel_names)}; "
                f"{lacking[0]}; name those to use: {{channel:A,B}}"
            )
        self.unreadable = sorted(self.unreadable) + lacking
        self._paths = PackedPaths.pack(whole)
        paths = [groups[image][channel] for image in whole for channel in self.channel_names]
        self._files = PackedPaths.pack(paths)
        self.fingerprint = hash_files(paths, file_sizes(self._root, paths))
        folders, label = path_classes(whole)
        self._label(name, [printable(folder) for folder in folders], label, classes)
        self.detect_form(name, self._paths, arrays=True)
        if self.form is None:
            try:
                read_whole(self._raster(0))
            except BadImageError as error:
                raise DataError(f"{name}: {self.name(0)}: {error}") from None
            raise DataError(f"{name}: none of the sampled images can be read")

    def _glance(self, i: int) -> Raster:
        return self._raster(i)

    def _raster(self, i: int) -> Raster:
        n = len(self.channel_names)
        paths = [self._root + self._files[i * n + c] for c in range(n)]
        return _Stack([open_raster(path) for path in paths], self.channel_names)

    def stamp(self) -> str:
        return stamp_files(self._root + path for path in self._files)


class _Stack(Raster):
    """Images of one size and type, one after the other along the channels."""

    def __init__(self, parts: Sequence[Raster], names: Sequence[str]) -> None:
        self.parts, self.names = parts, list(names)
        first = parts[0]
        for part, name in zip(parts, names, strict=True):
            if part.shape != (*first.shape[:2], 1):
                height, width, channels = part.shape
                raise BadImageError(
                    f"{name} has {width}x{height} pixels and {channels} channels; expected "
                    f"{first.shape[1]}x{first.shape[0]} pixels and one channel, as {names[0]}"
                )
            if part.kind != first.kind:
                raise BadImageError(f"{name} has {part.kind}, but {names[0]} has {first.kind}")
        self.kind = first.kind
        self.shape = check_shape(*first.shape[:2], len(parts))
        self.tall, self.tile = max(x.tall for x in parts), sum(x.tile for x in parts)
        self.slow = max(x.slow for x in parts)
        each = min(len(part.levels) for part in parts)
        self.levels = [_Stack([part.levels[i] for part in parts], names) for i in range(each)]

    def read(self, box: Box | None = None) -> np.ndarray:
        height, width = (box.height, box.width) if box else self.shape[:2]
        found = np.empty((height, width, len(self.parts)), self.kind)
        for i, part in enumerate(self.parts):
            found[:, :, i : i + 1] = part.read(box)
        return found


def parse_pattern(pattern: str) -> tuple[re.Pattern[str], list[str]]:
    """A regular expression with groups folder, name and channel; and the channels, if listed."""
    text, at, listed, fields = "", 0, list[str](), list[str]()
    for field in _FIELD.finditer(pattern):
        text += re.escape(pattern[at : field.start()])
        at = field.end()
        kind, values = field.groups()
        fields.append(kind)
        if kind == "channel" and values:
            listed = values.split(",")
            text += f"(?P<channel>{'|'.join(map(re.escape, listed))})"
        else:  # a name takes as much as it can, a channel as little
            text += "(?P<name>[^/]+)" if kind == "name" else "(?P<channel>[^/]+?)"
    if sorted(fields) != ["channel", "name"] or len(set(listed)) < len(listed):
        raise DataError(
            f"{printable(pattern)}: expected a pattern with {{name}} and {{channel}} once each, "
            f"as {{name}}_{{channel}}.tif or {{name}}/{{channel:B02,B03}}.tif"
        )
    return re.compile(f"(?P<folder>.*/)?{text}{re.escape(pattern[at:])}", re.DOTALL), listed


def _open(text: str, split: Split | None) -> Groups:
    root, _, pattern = text.rpartition("@")
    root = root or "."
    if not os.path.isdir(root):
        raise DataError(f"{printable(root)}: no such folder; give FOLDER@PATTERN")
    if has_splits(root):
        train = Groups(split_folder(root, None), pattern)
        if split != "test":
            return train
        pattern = _FIELD.sub(lambda f: _listed(f, train.channel_names), pattern)
        return Groups(split_folder(root, split), pattern, train.classes)
    refuse_split(text, split)
    return Groups(root, pattern)


def _listed(field: re.Match[str], names: list[str]) -> str:
    return f"{{channel:{','.join(names)}}}" if field[1] == "channel" else field[0]


GROUPS = Source(
    "groups", _open, recognise=lambda text: "@" in text and "{channel" in text.rpartition("@")[2]
)
