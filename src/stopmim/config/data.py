"""The section `data` of the config: what is read, how it is cropped, and what its numbers mean."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from stopmim.config.section import FractionRange, Section

Kind = Literal["uint8", "uint16", "int16", "float32"]  # of the numbers of an image, as stored
PerChannel = Annotated[tuple[float, ...], Field(min_length=1, max_length=64)]
Side = Annotated[int, Field(ge=1)]
ChannelName = Annotated[str, Field(min_length=1, max_length=64)]


class DataConfig(Section):
    crop_scale: FractionRange = (0.3, 1.0)
    """area of the random crop as a fraction of the image: smallest, largest"""
    crop_pixels: tuple[Side, Side] | None = None
    """side of the random crop in pixels of the image, for large ones; null: by crop_scale"""
    crops_per_image: int = Field(default=1, ge=1, le=4096)
    """random crops of an image each time it is opened; an epoch has as many times the samples"""
    decode: Literal["whole", "reduced"] = "whole"
    """reduced: JPEGs much larger than their crops are decoded at 1/2, 1/4 or 1/8 of their size"""
    augmentation: Literal["crop", "flip", "released"] | None = None
    """crop: random crop; flip: and mirror (MAE); released: and grey, blur; null: by compat"""
    max_bad: float = Field(default=0.01, ge=0, le=1)
    """fraction of unreadable images above which the run stops"""
    skip: str | None = Field(default=None, pattern=r"\.jsonl$")
    """list of images to leave out: from `stopmim check --fix-list`, or a bad_files.jsonl"""
    channels: int | None = Field(default=None, ge=1, le=64)
    """channels of an image; null: found by looking, 3 for ordinary pictures"""
    kind: Kind | None = None
    """type of the stored numbers; null: found by looking, uint8 for ordinary pictures"""
    channel_names: Annotated[tuple[ChannelName, ...], Field(min_length=1, max_length=64)] | None = (
        None
    )
    """names of the channels, as red or nir; null: those of the source, if it has any"""
    normalise: Literal["imagenet", "measured", "per-image"] | None = None
    """imagenet: its statistics; measured: own, of a sample; null: imagenet for 8-bit RGB"""
    low: PerChannel | None = None
    """smallest value of each channel, lower ones are clipped to it; null: measured"""
    high: PerChannel | None = None
    """largest value of each channel; null: measured"""
    mean: PerChannel | None = None
    """mean of each channel, in stored units; null: by normalise"""
    std: PerChannel | None = None
    """standard deviation of each channel, in stored units; null: by normalise"""

    @model_validator(mode="after")
    def _smallest_first(self) -> Self:
        if self.crop_pixels is not None and self.crop_pixels[0] > self.crop_pixels[1]:
            low, high = self.crop_pixels
            raise ValueError(f"crop_pixels: the smallest comes first, got {low} {high}")
        return self

    @model_validator(mode="after")
    def _one_number_per_channel(self) -> Self:
        lengths = {
            name: len(value)
            for name in ("channel_names", "low", "high", "mean", "std")
            if (value := getattr(self, name)) is not None
        }
        for name, length in lengths.items():
            if length != (self.channels or 3):
                what = "names" if name == "channel_names" else "numbers"
                raise ValueError(f"{name}: {length} {what} for {self.channels or 3} channels")
        if self.std is not None and min(self.std) <= 0:
            raise ValueError(f"std: must be positive, got {min(self.std):g}")
        return self
