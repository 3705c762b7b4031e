"""Base class of all sections of the config, and the kinds of numbers in them."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


def _ascending(pair: tuple[float, float]) -> tuple[float, float]:
    if not 0 < pair[0] <= pair[1]:
        raise ValueError(f"must be 0 < smallest <= largest, got {pair[0]:g}, {pair[1]:g}")
    return pair


def count_or_share(value: object) -> object:
    # One message of our own: a union would give one for each of its types.
    fits = value >= 1 if type(value) is int else type(value) is float and 0 < value <= 1
    if not fits and value is not None:
        raise ValueError(f"must be a number of patches, or a share of them as 0.4, got {value!r}")
    return value


Compat = Literal["released"]
Count = Annotated[int, Field(ge=1, le=10**9)]
Fraction = Annotated[float, Field(gt=0, le=1)]
FractionRange = Annotated[tuple[Fraction, Fraction], AfterValidator(_ascending)]
Range = Annotated[tuple[float, float], AfterValidator(_ascending)]
Momentum = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]  # of 1, AdamW would divide by 0
Decay = Annotated[float, Field(ge=0, le=1e6)]
Levels = Annotated[tuple[Decay, ...], Field(min_length=2, max_length=16)]


class Section(BaseModel):
    """Base of all sections: exact types, no unknown keys, finite numbers, immutable."""

    # Docstrings of attributes are the comments in `--dry-run`.
    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def has_no_effect(section: Section, names: tuple[str, ...], reason: str) -> None:
    for name in names:
        if getattr(section, name) != type(section).model_fields[name].default:
            raise ValueError(f"{name} has no effect with {reason}; leave it out")
