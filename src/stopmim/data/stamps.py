"""When files were last written, which the fingerprint of images leaves out.

Images of one size without compression have files of one size: overwritten in place by others, they
keep their fingerprint. A run may go on with them; what was found about them before is not true.
"""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from stopmim.data.images import Images
from stopmim.data.sources.folder import Files
from stopmim.data.sources.parquet import Parquet
from stopmim.data.sources.tar import Tar
from stopmim.data.subset import source


def stamp(images: Images) -> str:
    """Changes when any file behind `images` is written anew; one stat each.

    Empty for images that are not read from files: their fingerprint is that of their content.
    """
    match source(images):
        case Files() as found:
            return of_files(found.files())
        case Tar(shards=shards):
            return of_files(shards)
        case Parquet(files=files):
            return of_files(files)
        case _:
            return ""


def of_files(files: Iterable[Path | str | bytes]) -> str:
    """Changes with the size of any of these files, and the time of its last change."""
    digest = hashlib.sha256()
    for file in files:
        try:
            status = os.stat(file)
            digest.update(b"%d %d\n" % (status.st_size, status.st_mtime_ns))
        except OSError:  # whoever reads it will say why
            digest.update(b"none\n")
    return digest.hexdigest()
