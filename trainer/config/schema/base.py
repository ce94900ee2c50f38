"""The base class of all sections, and the value types that they share. The schema knows types and
units; defaults live in ``conf/config.yaml``.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A group of keys. Frozen, no unknown keys, no conversions between types except int to
    float.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


Count = Annotated[int, Field(ge=1)]
"""A whole number, at least 1."""
Whole = Annotated[int, Field(ge=0)]
"""A whole number, at least 0."""
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
"""A whole number of 32 bits: what every random generator takes, with step and sample mixed in."""
Positive = Annotated[float, Field(gt=0)]
"""A number above 0."""
NonNegative = Annotated[float, Field(ge=0)]
"""A number, at least 0."""
Share = Annotated[float, Field(ge=0, le=1)]
"""A number from 0 to 1."""
OpenShare = Annotated[float, Field(gt=0, le=1)]
"""A number above 0, at most 1."""
Text = Annotated[str, Field(min_length=1)]
"""A non-empty text."""
Budget = Count | list[Count] | Literal["auto"]
"""Tokens of a micro-batch: one number, one per rank, or measured at start."""
