"""Best-fit decreasing: each piece goes into the fullest bin that still has room for it.

A bin is one number while it is filled, ``room * count + bin``: sorted numbers are searched by
bisection, and the fullest bin with enough room is the first that is large enough.
"""

from __future__ import annotations

from bisect import bisect_left

from trainer.batching.loops.primitives import IntList, ascending, floats, integers


def best_fit(sizes: IntList, caps: IntList, share: float) -> IntList:
    """Bin of each piece [pieces]; the first is -1 when a piece finds no room.

    ``sizes`` fall. ``share`` lowers the caps [bins] to that part of them; where all caps are equal
    a piece above it may still have a bin alone.
    """
    count = len(caps)
    cap = caps[0]
    lowered_cap = int(cap * share)
    out = integers(len(sizes))
    room, opened = _open_unlike(caps, share)
    for i in range(len(sizes)):
        size = sizes[i] * count
        at = bisect_left(room, size, 0, opened)
        if at < opened:
            left = room[at]
        elif opened < count and sizes[i] <= cap:
            left = max(lowered_cap, sizes[i]) * count + opened
            opened += 1
        else:
            out[0] = -1
            break
        out[i] = left % count
        _move_down(room, at, left - size)
    return out


def _open_unlike(caps: IntList, share: float) -> tuple[IntList, int]:
    """Bins that are open from the start, by rising room: all where caps differ, else none.

    Returns the rooms [bins] and how many of them are open.
    """
    count = len(caps)
    room = integers(count)
    unlike = False
    for b in range(count):
        unlike = unlike or caps[b] != caps[0]
    if not unlike:
        return room, 0
    lowered = floats(count)
    for b in range(count):
        lowered[b] = float(int(caps[b] * share))
    opened = 0
    for b in ascending(lowered):
        room[opened] = int(lowered[b]) * count + b
        opened += 1
    return room, opened


def _move_down(room: IntList, at: int, value: int) -> None:
    """Put ``value`` in place of ``room[at]``, which is not smaller, and keep ``room`` sorted."""
    while at > 0 and room[at - 1] > value:
        room[at] = room[at - 1]
        at -= 1
    room[at] = value


def open_bins(
    ranks: IntList, buckets: IntList, sizes: IntList, caps: IntList
) -> tuple[IntList, IntList]:
    """Bin of each piece within its rank [pieces], and the bins of each rank [ranks].

    A bin holds one bucket. Pieces come by rank, bucket and falling size; ``caps`` are [ranks].
    """
    count = len(sizes)
    room = integers(count)  # of the bins of one rank and bucket
    bins_of_rank = integers(len(caps))
    out = integers(count)
    opened = 0
    for i in range(count):
        if i == 0 or ranks[i] != ranks[i - 1] or buckets[i] != buckets[i - 1]:
            opened = 0
        size = sizes[i] * count
        at = bisect_left(room, size, 0, opened)
        if at < opened:
            left = room[at]
        else:
            left = caps[ranks[i]] * count + bins_of_rank[ranks[i]]
            bins_of_rank[ranks[i]] += 1
            opened += 1
        out[i] = left % count
        _move_down(room, at, left - size)
    return out, bins_of_rank


def cut(opens: list[bool], own: IntList, prompts: IntList, longest: IntList, cap: int) -> IntList:
    """Indices at which pieces of groups start [pieces].

    A piece starts where ``opens`` says that a group or bucket begins, or where the one before holds
    ``longest`` sequences or would hold more than ``cap`` tokens. All lists are [sequences];
    ``prompts`` are tokens that each piece holds once, 0 where prompts are not shared.
    """
    out = integers(len(own))
    pieces = 0
    held = 0
    count = 0
    for i in range(len(own)):
        if opens[i] or count == longest[i] or held + own[i] > cap:
            out[pieces] = i
            pieces += 1
            held = prompts[i]
            count = 0
        held += own[i]
        count += 1
    return out[:pieces]
