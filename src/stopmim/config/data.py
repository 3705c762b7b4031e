"""The section `data` of the config: what is read, how it is cropped, and what its numbers mean."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from stopmim.config.section import FractionRange, Section

Kind = Literal["uint8", "uint16", "int16", "float32"]  # of the numbers of an image, as stored
PerChannel = Annotated[tuple[float, ...], Field(min_length=1, max_length=64)]


class DataConfig(Section):
    crop_scale: FractionRange = (0.3, 1.0)
    """area of the random crop as a fraction of the image: smallest, largest"""
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
    def _one_number_per_channel(self) -> Self:
        lengths = {
            name: len(value)
            for name in ("low", "high", "mean", "std")
            if (value := getattr(self, name)) is not None
        }
        for name, length in lengths.items():
            if length != (self.channels or 3):
                raise ValueError(f"{name}: {length} numbers for {self.channels or 3} channels")
        if self.std is not None and min(self.std) <= 0:
            raise ValueError(f"std: must be positive, got {min(self.std):g}")
        return self
