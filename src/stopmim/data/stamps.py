"""Modification times of files, which the fingerprint of images leaves out.

Uncompressed images of one size have files of one size: overwritten in place by other images, they
keep their fingerprint. A run may resume with them, but cached results are no longer valid.
"""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from stopmim.data.images import FileBacked, Images


def stamp(images: Images) -> str:
    """Changes when a file of `images` is rewritten; one stat per file.

    Empty for images that are not read from files: their fingerprint covers the content.
    """
    return images.stamp() if isinstance(images, FileBacked) else ""


def stamp_files(files: Iterable[Path | str | bytes]) -> str:
    """Hash of the sizes and modification times of these files."""
    digest = hashlib.sha256()
    for file in files:
        try:
            status = os.stat(file)
            digest.update(b"%d %d\n" % (status.st_size, status.st_mtime_ns))
        except OSError:  # reading it will say why
            digest.update(b"none\n")
    return digest.hexdigest()
