"""Which columns of a table fit a terminal, and how wide each may be. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

GAP = 2
"""Blanks between two columns."""
LEAST_NAME = 12
"""Least width of a run's name, which is cut in front when it is longer than its place."""
LEAST_FLEXIBLE = 12
"""Least width of a column that gives way; it is left out where there is less."""


def fitted_widths(
    widths: Mapping[str, int],
    total: int,
    *,
    name: str,
    always: Sequence[str],
    extra: Sequence[str],
    flexible: Sequence[str],
) -> dict[str, int]:
    """Width of each column that a terminal of ``total`` characters shows, of those in ``widths``.

    ``widths``: what each needs, in the order to show them. ``always`` are shown whole, and so is
    the ``name`` as far as there is room; then ``flexible`` ones get at least a little, ``extra``
    ones are added in their order while they fit, and the rest goes to the flexible ones.
    """
    fixed = {title: widths[title] for title in always if title in widths}
    room = total - sum(width + GAP for width in fixed.values())
    giving = [title for title in flexible if title in widths]
    reserved = min(LEAST_FLEXIBLE + GAP, sum(widths[title] + GAP for title in giving))
    fixed[name] = min(widths[name], max(LEAST_NAME, room - reserved))
    room -= fixed[name]
    shown: dict[str, int] = {}
    for title in giving:
        least = min(widths[title], LEAST_FLEXIBLE)
        if room >= least + GAP:
            shown[title] = least
            room -= least + GAP
    for title in (one for one in extra if one in widths):
        if room >= widths[title] + GAP:
            fixed[title] = widths[title]
            room -= widths[title] + GAP
    for title in shown:
        more = min(room, widths[title] - shown[title])
        shown[title] += more
        room -= more
    return {title: (fixed | shown)[title] for title in widths if title in fixed | shown}


def cut(text: str, width: int, *, in_front: bool = False) -> str:
    """``text`` in ``width`` characters, with an ellipsis where something is left out."""
    if len(text) <= width:
        return text
    return "…" + text[len(text) - width + 1 :] if in_front else text[: width - 1] + "…"
