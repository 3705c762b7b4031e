"""The first layer of an encoder, made to fit images of other channels.

Shapes: D width, p pixels along an edge of a patch, C channels.
"""

import torch
from torch import Tensor

from stopmim.data.pixels import COLOURS, PixelStats


def fitted(weight: Tensor, theirs: PixelStats | None, own: PixelStats) -> tuple[Tensor, str]:
    """Filters (D, C, p, p) for the channels of `own`, and how they were made, "" if unchanged.

    `weight` are the filters of an encoder for `theirs`, None if its channels are unknown. A channel
    takes the filter of the channel with its name; all others take the mean filter. All are scaled,
    so that an image with equal channels keeps its response. Without common names, equally many
    channels are taken in order. Raises ValueError if the filters cannot be adapted.
    """
    given, wanted = weight.shape[1], own.channels
    before, after = theirs.words if theirs else None, own.words
    places = {name: i for i, name in enumerate(before or ())}
    order = [places.get(name) for name in after or [""] * wanted]  # filter of each channel
    named = [name for name in after or () if name in places]
    if given == wanted and (not named or order == list(range(given))):
        unlike = before and after and not named
        return weight, "channels in their order: none has a name in common" if unlike else ""
    if given == wanted and set(order) == set(range(given)):
        return weight[:, order], "channels in another order: filters by name"
    if given not in (len(COLOURS), wanted):
        where = f"filters of {given} channels do not fit images of {wanted}"
        raise ValueError(f"{where}; start from an encoder for RGB, or for as many channels")
    mean = weight.mean(dim=1)
    found = torch.stack([mean if i is None else weight[:, i] for i in order], dim=1)
    found = found * (given / wanted)
    # Keep the sum over all channels, even if some filters are not used.
    found = found + ((weight.sum(dim=1) - found.sum(dim=1)) / wanted)[:, None]
    others = "the mean filter for " + ("the others" if named else "each")
    how = f"{', '.join(named)} by name, {others}" if named else others
    return found, f"filters of {given} channels for {wanted}: {how}, times {given}/{wanted}"
