"""Batched generation with a transformers model: one prefill per prompt, one column per step, finished rows dropped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from trainer.errors import UserError
from trainer.rollout.hf.attention import decoding
from trainer.rollout.hf.cache import GROW, SlabCache
from trainer.rollout.hf.sampling import BLOCK, draw, truncate, uniforms
from trainer.rollout.protocol import Sample
from trainer.rollout.settings import KEY, Sampling

PREFILL_TOKENS = 16384
"""Prompt tokens, pads included, of one prefill pass."""
CHOICE_ELEMENTS = 2**26
"""Scores of one drawing pass: 512 MiB of float64."""
COMPACT_BELOW = 0.8
"""Finished rows leave the batch when at most this share of its rows is still alive: a copy of the cache costs
about one step, and pays when it makes all following steps this much cheaper."""


class Generator:
    """Generates on one rank with a causal language model of transformers, in whatever numeric type its weights have.

    ``model`` is called in eval mode and given back in the mode it was in; its weights stay trainable. With ZeRO 3
    gather the weights around :meth:`generate`. Samples don't depend on ``batch_size``, the order of prompts or the
    number of ranks, but for rounding: a random number within about 1e-6 of the border between two tokens can go either
    way. With the same prompts in the same order they are bit-equal.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        eos_ids: Sequence[int],
        pad_id: int,
        sampling: Sampling,
        batch_size: int | None = None,
    ) -> None:
        if not eos_ids:
            raise ValueError("generation needs at least one end token")
        self.model, self.pad_id, self.sampling = model, pad_id, sampling
        self.eos_ids, self.batch_size = list(eos_ids), batch_size

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], sample_ids: Sequence[int], seed: int, step: int
    ) -> list[Sample]:
        """One sample per prompt, in order. For n responses repeat the prompt n times with n sample ids: a prompt that
        stands several times in a batch is prefilled once.

        ``step`` and ``seed`` name the draw: equal arguments give equal samples. Raises :class:`UserError` for an empty
        prompt and one that leaves no room for the response, FloatingPointError when the model's logits are not finite.
        """
        if len(sample_ids) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(sample_ids)} sample ids")
        self._check(prompts)
        # Equal prompts side by side, and neighbours of nearly equal length: few pads.
        order = sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]), tuple(prompts[i]), sample_ids[i]))
        size = self.batch_size or max(len(order), 1)
        samples: dict[int, Sample] = {}
        training = self.model.training
        self.model.eval()
        try:
            with decoding(self.model):
                for start in range(0, len(order), size):
                    part = order[start : start + size]
                    drawn = self._batch([prompts[i] for i in part], [sample_ids[i] for i in part], seed, step)
                    samples.update(zip(part, drawn, strict=True))
        finally:
            self.model.train(training)
        return [samples[i] for i in range(len(prompts))]

    def _batch(self, prompts: list[Sequence[int]], sample_ids: list[int], seed: int, step: int) -> list[Sample]:
        limit, device = self.sampling.max_response_length, self._device
        logits, cache, pads = self._prefill(prompts)
        width = max(len(p) for p in prompts)
        rows = torch.arange(len(prompts), device=device)
        ids = torch.full((len(prompts), limit), self.pad_id, device=device)
        log_probs = torch.zeros(len(prompts), limit, device=device)
        lengths = torch.full((len(prompts),), limit, device=device)
        finished = torch.zeros(len(prompts), dtype=torch.bool, device=device)
        eos = torch.tensor(self.eos_ids, device=device)
        positions = (width - pads)[:, None]
        # A device must be waited for to see who has finished: look each step only where that is free.
        look_every = 1 if device.type == "cpu" else 4
        u = torch.empty(0)
        live_ids, padded = sample_ids, bool(pads.any())
        for t in range(limit):
            if t % BLOCK == 0 and not self.sampling.greedy:
                u = uniforms(seed, step, live_ids, t, min(BLOCK, -(-(limit - t) // 4) * 4)).to(device)
            token, picked = self._choose(logits, u[:, t % BLOCK] if u.numel() else u)
            ids[rows, t], log_probs[rows, t] = token, picked
            ended = torch.isin(token, eos) & ~finished[rows]
            lengths[rows] = torch.where(ended, t + 1, lengths[rows])
            finished[rows] |= ended
            if t + 1 == limit:
                break
            if t % look_every == 0:
                alive = ~finished[rows]
                n_alive = int(alive.sum())
                if n_alive == 0:
                    break
                if n_alive <= COMPACT_BELOW * len(rows):
                    kept = alive.nonzero().squeeze(1)
                    rows, token, positions, pads = rows[kept], token[kept], positions[kept], pads[kept]
                    u = u[kept] if u.numel() else u
                    live_ids = [live_ids[i] for i in kept.tolist()]
                    first = int(pads.min())
                    cache.keep(kept, first)
                    pads, padded = pads - first, bool((pads > first).any())
            mask = None
            if padded:
                columns = torch.arange(cache.get_seq_length() + 1, device=device)
                mask = (columns >= pads[:, None])[:, None, None]
            logits = self._forward(token[:, None], mask, positions, cache)
            positions = positions + 1
        return _collect(ids, log_probs, lengths, finished)

    def _prefill(self, prompts: list[Sequence[int]]) -> tuple[Tensor, SlabCache, Tensor]:
        """Logits [rows, vocabulary] after each prompt, the filled cache, and int64 [rows] pads on the left of each."""
        device = self._device
        places: dict[tuple[int, ...], list[int]] = {}
        for row, prompt in enumerate(prompts):
            places.setdefault(tuple(prompt), []).append(row)
        unique = sorted(places, key=len, reverse=True)
        width = len(unique[0])
        filled, logits = [], torch.empty(0)
        start = 0
        while start < len(unique):
            part = unique[start : start + max(1, PREFILL_TOKENS // len(unique[start]))]
            start += len(part)
            longest = len(part[0])
            ids = torch.tensor([[self.pad_id] * (longest - len(p)) + list(p) for p in part], device=device)
            pad = torch.tensor([longest - len(p) for p in part], device=device)
            mask = (torch.arange(longest, device=device) >= pad[:, None]) if bool(pad.any()) else None
            position_ids = (torch.arange(longest, device=device) - pad[:, None]).clamp(min=0)
            cache = DynamicCache(config=self.model.config)
            out = self._forward(ids, None if mask is None else mask.long(), position_ids, cache)
            copies = [(i, row) for i, p in enumerate(part) for row in places[p]]
            source, target = torch.tensor(copies, device=device).t()
            if not logits.numel():
                logits = out.new_empty(len(prompts), out.shape[-1])
            logits[target] = out[source]
            filled.append((cache, torch.stack([source, target])))
        room = min(self.sampling.max_response_length, GROW)
        pads = torch.tensor([width - len(p) for p in prompts], device=device)
        return logits, SlabCache(filled, len(prompts), width, room), pads

    def _forward(self, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: Any) -> Tensor:
        """Logits [rows, vocabulary] after the last column of ``ids`` [rows, columns]."""
        out: Tensor = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        return out[:, -1]

    def _choose(self, logits: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens int64 [rows] and their log-probs float32 [rows]. ``u`` [rows], not read when greedy."""
        size = max(1, CHOICE_ELEMENTS // logits.shape[-1])
        if len(logits) > size:
            starts = range(0, len(logits), size)
            chosen = [self._choose(logits[i : i + size], u[i : i + size]) for i in starts]
            return torch.cat([c[0] for c in chosen]), torch.cat([c[1] for c in chosen])
        how = self.sampling
        scores = logits.float() / how.scale
        if how.greedy:
            token = scores.argmax(dim=-1)
        else:
            token = draw(truncate(scores, how.top_k, how.top_p), u)
        picked = scores.gather(1, token[:, None]).squeeze(1) - scores.logsumexp(dim=-1)
        return token, picked

    @property
    def _device(self) -> torch.device:
        device: torch.device = self.model.get_input_embeddings().weight.device  # type: ignore[operator]
        return device

    def _check(self, prompts: Sequence[Sequence[int]]) -> None:
        limit = getattr(self.model.config, "max_position_embeddings", None)
        longest = max(map(len, prompts), default=1)
        if min(map(len, prompts), default=1) == 0:
            raise UserError(f"prompt {[len(p) for p in prompts].index(0)} of the batch is empty: it has no tokens")
        if limit is not None and longest + self.sampling.max_response_length > limit:
            raise UserError(
                f"{KEY}: a prompt of {longest} tokens and a response of {self.sampling.max_response_length} exceed "
                f"the model's {limit} positions; lower data.max_prompt_length or data.max_response_length"
            )


def _collect(ids: Tensor, log_probs: Tensor, lengths: Tensor, finished: Tensor) -> list[Sample]:
    ids, log_probs = ids.cpu(), log_probs.float().cpu()
    samples = []
    for row, (length, done) in enumerate(zip(lengths.tolist(), finished.tolist(), strict=True)):
        picked = log_probs[row, :length].clone()
        if not bool(torch.isfinite(picked).all()):
            raise FloatingPointError("the model's logits are not finite in generation: its weights may hold NaN")
        samples.append(Sample(ids[row, :length].clone(), picked, "stop" if done else "length"))
    return samples
