"""How other trainers cut micro-batches, written from their published descriptions. For comparison
only.

Each function takes the lengths of the sequences [sequences], the cap of a micro-batch in tokens and
the number of ranks. Ranks may get different numbers of micro-batches; the comparison pads with
empty ones.
"""

from __future__ import annotations

import numpy as np

from benchmarks.bin_packing import (
    first_fit,
    first_fit_decreasing,
    karmarkar_karp,
    modified_first_fit_decreasing,
)

MicroBatches = list[list[np.ndarray]]
"""Indices of the sequences of each micro-batch, [rank][k]."""


def verl_workload(lengths: np.ndarray) -> np.ndarray:
    """verl's cost of a sequence: a hidden size of 4096 for every model."""
    workload: np.ndarray = 24576.0 * lengths + lengths.astype(float) ** 2
    return workload


def static_padded(lengths: np.ndarray, cap: int, ranks: int, micro: int = 4) -> MicroBatches:
    """Equal blocks of ranks, ``micro`` sequences each, padded to the longest of the micro-batch."""
    blocks = np.array_split(np.arange(lengths.size), ranks)
    return [[b[i : i + micro] for i in range(0, b.size, micro)] for b in blocks]


def random_ffd(lengths: np.ndarray, cap: int, ranks: int) -> MicroBatches:
    """Ranks by chance, first-fit decreasing inside each."""
    shuffled = np.random.default_rng(0).permutation(lengths.size)
    return [
        [part[np.array(b)] for b in first_fit_decreasing(lengths[part], cap)]
        for part in np.array_split(shuffled, ranks)
    ]


def _ranks_by_kk(weight: np.ndarray, ranks: int) -> list[np.ndarray]:
    return karmarkar_karp(weight, ranks, equal=weight.size % ranks == 0)


def _verl_order(weight: np.ndarray, parts: list[np.ndarray]) -> list[np.ndarray]:
    """Heavy first, then interleaved so that light ones come first and last."""
    parts = sorted(parts, key=lambda p: -float(weight[p].sum()))
    return parts[::2][::-1] + parts[1::2]


def verl(lengths: np.ndarray, cap: int, ranks: int, *, loop: bool = False) -> MicroBatches:
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


def verl_loop(lengths: np.ndarray, cap: int, ranks: int) -> MicroBatches:
    return verl(lengths, cap, ranks, loop=True)


def openrlhf(lengths: np.ndarray, cap: int, ranks: int) -> MicroBatches:
    """Balanced ranks; the count by first-fit, largest over ranks; Karmarkar-Karp micro-batches on
    tokens.
    """
    weight = lengths.astype(float)
    parts = _ranks_by_kk(weight, ranks)
    k = max(len(first_fit(lengths[p], cap, np.arange(p.size))) for p in parts)
    return [[p[b] for b in karmarkar_karp(weight[p], min(k, p.size))] for p in parts]


def nemo_rl(lengths: np.ndarray, cap: int, ranks: int) -> MicroBatches:
    """Modified first-fit decreasing over the whole step, single sequences moved out until the
    number of bins is a multiple of the ranks, bins dealt out in turn.
    """
    bins = modified_first_fit_decreasing(lengths, cap)
    while len(bins) % ranks and any(len(b) > 1 for b in bins):
        fullest = max(range(len(bins)), key=lambda b: len(bins[b]))
        bins.append([bins[fullest].pop()])
    return [[np.array(b) for b in bins[r::ranks]] for r in range(ranks)]


def slime(lengths: np.ndarray, cap: int, ranks: int) -> MicroBatches:
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
        [np.array(bins[b]) for b in sorted(of_rank.tolist(), key=lambda b: -loads[b])]
        for of_rank in dealt
    ]


def kk_capped(lengths: np.ndarray, cap: int, ranks: int) -> MicroBatches:
    """The best mixture of the above, used by none: Karmarkar-Karp ranks, as many micro-batches as
    first-fit decreasing needs, Karmarkar-Karp micro-batches where they keep the cap, else first-fit
    decreasing; heavy first.
    """
    weight = verl_workload(lengths)
    parts = _ranks_by_kk(weight, ranks)
    packed = [first_fit_decreasing(lengths[p], cap) for p in parts]
    k = max(map(len, packed))
    out: MicroBatches = []
    for p, ffd in zip(parts, packed, strict=True):
        even = karmarkar_karp(weight[p], k)
        fits = all(int(lengths[p[b]].sum()) <= cap for b in even)
        chosen = [p[b] for b in even] if fits else [p[np.array(b)] for b in ffd]
        while len(chosen) < k and any(m.size > 1 for m in chosen):
            chosen.sort(key=lambda m: -float(weight[m].sum()) if m.size > 1 else 0.0)
            whole = chosen.pop(0)
            whole = whole[np.argsort(-lengths[whole], kind="stable")]
            chosen += [whole[::2], whole[1::2]]
        out.append(sorted(chosen, key=lambda m: -float(weight[m].sum())))
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
