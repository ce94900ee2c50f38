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


MOST = 2**31 - 1
"""Largest whole number of a setting: what 32 bits hold, far above anything that makes sense."""
LARGEST = 1e9
"""Largest number of a setting."""
TEXT_LENGTH = 4096
"""Most characters of a text, which is a name or a path (Linux's PATH_MAX)."""

Count = Annotated[int, Field(ge=1, le=MOST)]
"""A whole number, at least 1."""
Whole = Annotated[int, Field(ge=0, le=MOST)]
"""A whole number, at least 0."""
Interval = Annotated[int, Field(ge=-1, le=MOST)]
"""A number of steps, tokens or the like; -1 for none, or for all."""
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
"""A whole number of 32 bits: what every random generator takes, with step and sample mixed in."""
Positive = Annotated[float, Field(gt=0, le=LARGEST)]
"""A number above 0."""
NonNegative = Annotated[float, Field(ge=0, le=LARGEST)]
"""A number, at least 0."""
Factor = Annotated[float, Field(ge=1, le=LARGEST)]
"""A number, at least 1."""
Share = Annotated[float, Field(ge=0, le=1)]
"""A number from 0 to 1."""
OpenShare = Annotated[float, Field(gt=0, le=1)]
"""A number above 0, at most 1."""
HIGHEST_TEMPERATURE = 1000.0
"""Above it every token is as likely as any other."""
LOWEST_TEMPERATURE = 0.001
"""Below it logits leave the range of their type; the likeliest token is ``do_sample=false``."""
Text = Annotated[str, Field(min_length=1, max_length=TEXT_LENGTH, pattern=r"^[^\x00-\x1f\x7f]*$")]
"""A non-empty text in one line, without control characters: a name or a path."""
Budget = Count | Annotated[list[Count], Field(min_length=1)] | Literal["auto"]
"""Tokens of a micro-batch: one number, one per rank, or measured at start."""
