"""From ``actor_rollout_ref.rollout.name`` to a generation engine."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedTokenizerBase

from trainer.errors import UserError, nearest
from trainer.rollout.generator import Generator
from trainer.rollout.settings import KEY, RolloutEngine, Sampling

ENGINES = ("hf",)


def make_engine(name: str, model: nn.Module, tokenizer: PreTrainedTokenizerBase, sampling: Sampling) -> RolloutEngine:
    """The engine ``name`` over the weights of ``model``. Raises :class:`UserError` for one that there isn't."""
    if name == "hf":
        pad = tokenizer.pad_token_id
        eos = eos_ids(model, tokenizer)
        return Generator(model, eos_ids=eos, pad_id=eos[0] if pad is None else int(pad), sampling=sampling)
    if name == "vllm":
        raise UserError(f"{KEY}.name=vllm is not supported yet; use {KEY}.name=hf")
    raise UserError(f"{KEY}.name={name}: no such engine{nearest(name, ENGINES)}. There is {', '.join(ENGINES)}")


def eos_ids(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that end a response: the tokenizer's and those of the model's generation config (chat models name more
    than one). Raises :class:`UserError` when there is none.
    """
    found = {tokenizer.eos_token_id}
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    found.update(configured if isinstance(configured, list | tuple) else [configured])
    ids = sorted(int(i) for i in found if i is not None)
    if not ids:
        raise UserError("actor_rollout_ref.model.path: neither tokenizer nor generation config names an end token")
    return ids
