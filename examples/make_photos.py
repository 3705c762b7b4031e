"""Write a folder of JPEGs to try stopmim with: rendered scenes, sorted into albums.

python examples/make_photos.py [FOLDER [COUNT]]

An album has the scenes whose nearest object is about as far away: close, middle or far. Nothing
below knows that they are rendered: any folder of photographs would do.
"""

import sys
from pathlib import Path

from PIL import Image

from stopmim.data.sources.open import open_images

ALBUMS = ("close", "close", "middle", "middle", "far", "far")  # of the six distances


def main(folder: str = "photos", count: str = "1500") -> None:
    scenes = open_images(f"scenes:{count}:128:7")
    for i in range(len(scenes)):
        album = Path(folder) / ALBUMS[scenes.labels["distance"][i]]
        album.mkdir(parents=True, exist_ok=True)
        Image.fromarray(scenes.read(i)).save(album / f"{i:04}.jpg", quality=90)
    print(f"{count} photographs in {folder}/close, {folder}/middle and {folder}/far")


if __name__ == "__main__":
    main(*sys.argv[1:])
