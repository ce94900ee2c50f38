"""How other trainers cut micro-batches, written from their published descriptions. For comparison
only.

Each function returns ``bins[rank] = list of micro-batches``, a micro-batch being an index array.
Ranks may have different counts; the comparison pads with empty ones.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import numpy as np

Layout = list[list[np.ndarray]]


def verl_workload(lengths: np.ndarray) -> np.ndarray:
    """verl's cost of a sequence: a hidden size of 4096 for every model."""
    workload: np.ndarray = 24576.0 * lengths + lengths.astype(float) ** 2
    return workload


def karmarkar_karp(weight: np.ndarray, k: int, *, equal: bool = False) -> list[np.ndarray]:
    """Largest differencing method for k parts; ``equal`` keeps the counts equal (needs a multiple
    of k).
    """
    n = weight.size
    order = np.argsort(weight, kind="stable")
    sums: list[np.ndarray | None] = []
    kids: list[tuple[int, int] | None] = []
    perms: list[np.ndarray] = []
    leaves: list[np.ndarray] = []
    blocks = order.reshape(-1, k)[:, ::-1] if equal else order[:, None]
    for block in blocks:
        s = np.zeros(k)
        s[: block.size] = weight[block]
        sums.append(s)
        kids.append(None)
        perms.append(block)
        leaves.append(block)
    heap = [(-(float(s[0]) - float(s[-1])), i) for i, s in enumerate(sums) if s is not None]
    heapify(heap)
    while len(heap) > 1:
        _, a = heappop(heap)
        _, b = heappop(heap)
        x, y = sums[a], sums[b]
        assert x is not None and y is not None
        s = x + y[::-1]
        p = np.argsort(-s, kind="stable")
        s = s[p]
        heappush(heap, (-(float(s[0]) - float(s[-1])), len(sums)))
        sums[a] = sums[b] = None
        sums.append(s)
        kids.append((a, b))
        perms.append(p)
    out = np.empty(n, np.int64)
    place = {len(sums) - 1: np.arange(k)}
    for node in range(len(sums) - 1, -1, -1):
        where, pair = place.pop(node), kids[node]
        if pair is None:
            out[perms[node]] = where[: perms[node].size]
            continue
        mine = np.empty(k, np.int64)
        mine[perms[node]] = where
        place[pair[0]], place[pair[1]] = mine, mine[::-1]
    by_part = np.argsort(out, kind="stable")
    return np.split(by_part, np.cumsum(np.bincount(out, minlength=k))[:-1])


def first_fit(lengths: np.ndarray, cap: int, order: np.ndarray) -> list[list[int]]:
    """First-fit over ``order``."""
    bins: list[list[int]] = []
    room: np.ndarray = np.zeros(lengths.size + 1, np.int64)
    for i in order.tolist():
        size = int(lengths[i])
        fits = room[: len(bins)] >= size
        b = int(fits.argmax()) if len(bins) else 0
        if not len(bins) or not fits[b]:
            b = len(bins)
            bins.append([])
            room[b] = cap
        bins[b].append(i)
        room[b] -= size
    return bins


def first_fit_decreasing(lengths: np.ndarray, cap: int) -> list[list[int]]:
    return first_fit(lengths, cap, np.argsort(-lengths, kind="stable"))


def modified_first_fit_decreasing(lengths: np.ndarray, cap: int) -> list[list[int]]:
    """Johnson and Garey's five phases, the last one first-fit decreasing over the bins made so
    far.
    """
    order = np.argsort(-lengths, kind="stable").tolist()
    large = [i for i in order if lengths[i] > cap / 2]
    medium = [i for i in order if cap / 3 < lengths[i] <= cap / 2]
    small = [i for i in order if cap / 6 < lengths[i] <= cap / 3]
    tiny = [i for i in order if lengths[i] <= cap / 6]
    bins = [[i] for i in large]
    room = [cap - int(lengths[i]) for i in large]

    def put(i: int, b: int) -> None:
        bins[b].append(i)
        room[b] -= int(lengths[i])

    for b in range(len(bins)):  # phase 2: one medium item beside each large one, where it fits
        for i in medium:
            if lengths[i] <= room[b]:
                put(i, b)
                medium.remove(i)
                break
    for b in range(len(bins) - 1, -1, -1):  # phase 3: two small items where no medium one went
        if len(bins[b]) > 1 or len(small) < 2 or lengths[small[-1]] + lengths[small[-2]] > room[b]:
            continue
        least = small.pop()
        for i in small:
            if lengths[i] + lengths[least] <= room[b]:
                put(least, b)
                put(i, b)
                small.remove(i)
                break
        else:
            small.append(least)
    for i in sorted(medium + small + tiny, key=lambda i: -lengths[i]):  # phases 4 and 5
        for b in range(len(bins)):
            if lengths[i] <= room[b]:
                put(i, b)
                break
        else:
            bins.append([i])
            room.append(cap - int(lengths[i]))
    return bins


def static_padded(lengths: np.ndarray, cap: int, ranks: int, micro: int = 4) -> Layout:
    """Equal blocks of ranks, ``micro`` sequences each, padded to the longest of the micro-batch."""
    blocks = np.array_split(np.arange(lengths.size), ranks)
    return [[b[i : i + micro] for i in range(0, b.size, micro)] for b in blocks]


def random_ffd(lengths: np.ndarray, cap: int, ranks: int) -> Layout:
    """Ranks by chance, first-fit decreasing inside each."""
    shuffled = np.random.default_rng(0).permutation(lengths.size)
    return [
        [part[np.array(b)] for b in first_fit_decreasing(lengths[part], cap)]
        for part in np.array_split(shuffled, ranks)
    ]


def _ranks_by_kk(weight: np.ndarray, ranks: int) -> list[np.ndarray]:
    return karmarkar_karp(weight, ranks, equal=weight.size % ranks == 0)


def _verl_order(weight: np.ndarray, parts: list[np.ndarray]) -> list[np.ndarray]:
    """Heavy first, then interleaved so that small ones stand at both ends."""
    parts = sorted(parts, key=lambda p: -float(weight[p].sum()))
    return parts[::2][::-1] + parts[1::2]


def verl(lengths: np.ndarray, cap: int, ranks: int, *, loop: bool = False) -> Layout:
    """Karmarkar-Karp ranks on workload; the count is ceil(tokens / cap), largest over ranks;
    Karmarkar-Karp micro-batches on workload. ``loop`` (since August 2026): one more micro-batch
    until every one is within the cap.
    """
    weight = verl_workload(lengths)
    parts = _ranks_by_kk(weight, ranks)
    k = max(min(p.size, -(-int(lengths[p].sum()) // cap)) for p in parts)
    while True:
        out = [[p[b] for b in karmarkar_karp(weight[p], k)] for p in parts]
        if not loop or max(int(lengths[b].sum()) for rank in out for b in rank) <= cap:
            return [_verl_order(weight, rank) for rank in out]
        k += 1


def verl_loop(lengths: np.ndarray, cap: int, ranks: int) -> Layout:
    return verl(lengths, cap, ranks, loop=True)


def openrlhf(lengths: np.ndarray, cap: int, ranks: int) -> Layout:
    """Balanced ranks; the count by first-fit, largest over ranks; Karmarkar-Karp micro-batches on
    tokens.
    """
    weight = lengths.astype(float)
    parts = _ranks_by_kk(weight, ranks)
    k = max(len(first_fit(lengths[p], cap, np.arange(p.size))) for p in parts)
    return [[p[b] for b in karmarkar_karp(weight[p], min(k, p.size))] for p in parts]


def nemo_rl(lengths: np.ndarray, cap: int, ranks: int) -> Layout:
    """Modified first-fit decreasing over the whole step, single sequences moved out until the
    number of bins is a multiple of the ranks, bins dealt out in turn.
    """
    bins = modified_first_fit_decreasing(lengths, cap)
    while len(bins) % ranks and any(len(b) > 1 for b in bins):
        fullest = max(range(len(bins)), key=lambda b: len(bins[b]))
        bins.append([bins[fullest].pop()])
    return [[np.array(b) for b in bins[r::ranks]] for r in range(ranks)]


def slime(lengths: np.ndarray, cap: int, ranks: int) -> Layout:
    """First-fit over the whole step, the largest bin halved until the count is a multiple of the
    ranks, Karmarkar-Karp over bins with equal counts, heavy first.
    """
    weight = verl_workload(lengths)
    bins = first_fit(lengths, cap, np.arange(lengths.size))
    while len(bins) % ranks and any(len(b) > 1 for b in bins):
        largest = max(
            (b for b in range(len(bins)) if len(bins[b]) > 1),
            key=lambda b: int(lengths[bins[b]].sum()),
        )
        halves: tuple[list[int], list[int]] = ([], [])
        for i in sorted(bins[largest], key=lambda i: -lengths[i]):
            min(halves, key=lambda h: int(lengths[h].sum()) if h else 0).append(i)
        bins[largest] = halves[0]
        bins.append(halves[1])
    loads = np.array([float(weight[b].sum()) for b in bins])
    if loads.size % ranks:
        return [[np.array(b) for b in bins[r::ranks]] for r in range(ranks)]
    dealt = karmarkar_karp(loads, ranks, equal=True)
    return [
        [np.array(bins[b]) for b in sorted(mine.tolist(), key=lambda b: -loads[b])]
        for mine in dealt
    ]


def kk_capped(lengths: np.ndarray, cap: int, ranks: int) -> Layout:
    """The best mixture of the above, used by none: Karmarkar-Karp ranks, as many micro-batches as
    first-fit decreasing needs, Karmarkar-Karp micro-batches where they keep the cap, else first-fit
    decreasing; heavy first.
    """
    weight = verl_workload(lengths)
    parts = _ranks_by_kk(weight, ranks)
    packed = [first_fit_decreasing(lengths[p], cap) for p in parts]
    k = max(map(len, packed))
    out: Layout = []
    for p, ffd in zip(parts, packed, strict=True):
        even = karmarkar_karp(weight[p], k)
        fits = all(int(lengths[p[b]].sum()) <= cap for b in even)
        mine = [p[b] for b in even] if fits else [p[np.array(b)] for b in ffd]
        while len(mine) < k and any(m.size > 1 for m in mine):
            mine.sort(key=lambda m: -float(weight[m].sum()) if m.size > 1 else 0.0)
            whole = mine.pop(0)
            whole = whole[np.argsort(-lengths[whole], kind="stable")]
            mine += [whole[::2], whole[1::2]]
        out.append(sorted(mine, key=lambda m: -float(weight[m].sum())))
    return out


PEERS = {
    "static, padded, 4 each": static_padded,
    "random ranks + FFD": random_ffd,
    "verl <= 0.8: KK + KK": verl,
    "verl PR 7553: KK + KK, +1 until it fits": verl_loop,
    "OpenRLHF: KK + first-fit count + KK": openrlhf,
    "NeMo-RL: MFFD dealt out": nemo_rl,
    "slime: first-fit + KK": slime,
    "KK + FFD/KK capped (used by none)": kk_capped,
}
