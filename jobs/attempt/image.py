"""Whether the image of an attempt is the one that was submitted. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

IMAGE_CHANGED = "image_changed"
"""Cause of an attempt that was refused: what ran would not be what is recorded."""


def image_problem(plan: Mapping[str, Any], digest: str) -> str:
    """Why an attempt must not run; empty when it may.

    ``plan`` is ``job.json``; ``digest`` that of the image now, empty where its file is the one that
    it was at submit.
    """
    image = plan.get("image", {})
    if digest in ("", image.get("digest")) or not image.get("verify", True):
        return ""
    return (
        f"{image.get('path')} has digest {digest}, not {image.get('digest')} as at submit: the "
        "image was changed. Put the old one back, or launch the sweep again; "
        "container.verify=false runs whatever is there, and records it"
    )
