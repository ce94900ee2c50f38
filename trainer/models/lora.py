"""LoRA (Hu et al., arXiv 2106.09685): trained low-rank matrices next to the base weights, which are
not trained.

Adapters are peft's layers inside the transformers model: its class, its forward pass and the names
of all other weights stay. No other module knows peft.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from xxhash import xxh3_128

from trainer.base.errors import UserError

KEY = "actor_rollout_ref.model.target_modules"
ALL = "all-linear"
NAME = "default"
"""peft's name of the only adapter."""
BASE = ".base_layer"
"""What peft puts into the name of a weight that has an adapter."""


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Adapters of ``rank`` on the linear layers named ``targets``, or on all but the head.

    ``seed`` initialises lora_A.
    """

    rank: int
    alpha: float
    targets: Literal["all-linear"] | Sequence[str] = ALL
    seed: int = 0


@dataclass(frozen=True)
class Adapter:
    """Adds ``scale * x @ down.T @ up.T`` to a layer's output.

    ``down``: lora_A [rank, in]; ``up``: lora_B [out, rank].
    """

    down: nn.Parameter
    up: nn.Parameter
    scale: float


@dataclass(frozen=True)
class Weight:
    """A weight of the model under the name that it had without adapters."""

    name: str
    base: nn.Parameter
    adapter: Adapter | None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that ``merged`` reads; under ZeRO-3 they must be gathered first."""
        if self.adapter is None:
            return [self.base]
        return [self.base, self.adapter.down, self.adapter.up]

    def merged(self) -> Tensor:
        """W, or W + scale up @ down: [out, in] without gradient.

        The sum is taken in float32 and rounded once to the dtype of W.
        """
        base = self.base.detach()
        if self.adapter is None:
            return base
        up = self.adapter.up.detach().float()
        down = self.adapter.down.detach().float()
        return torch.addmm(base.float(), up, down, alpha=self.adapter.scale).to(base.dtype)


def add_adapters(model: nn.Module, lora: Lora) -> None:
    """Add adapters to ``model`` (transformers) and train nothing else.

    lora_B begins with zeros, so the model's output does not change.

    Raises :class:`UserError` for a target that is no linear layer of the model.
    """
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=_targets(model, lora.targets),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(getattr(model, "name_or_path", "")),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(lora.seed)
        inject_adapter_in_model(config, model, adapter_name=NAME)


def has_adapters(model: nn.Module) -> bool:
    """Whether ``model`` trains adapters."""
    return any(adapter_of(layer) is not None for layer in model.modules())


def adapter_of(layer: nn.Module) -> Adapter | None:
    """The adapter of a linear layer, or None."""
    downs: Any = layer._modules.get("lora_A")
    if downs is None:
        return None
    wrapped: Any = layer
    return Adapter(downs[NAME].weight, wrapped.lora_B[NAME].weight, float(wrapped.scaling[NAME]))


def weights(model: nn.Module) -> Iterator[Weight]:
    """The weights under the names and in the order that ``named_parameters`` has without adapters;
    tied weights once.
    """
    seen: set[int] = set()
    for prefix, layer in model.named_modules():
        adapter = adapter_of(layer)
        if adapter is not None:
            seen |= {id(adapter.down), id(adapter.up)}
            wrapped: Any = layer
            seen.add(id(wrapped.base_layer.weight))
            yield Weight(_join(prefix, "weight"), wrapped.base_layer.weight, adapter)
            continue
        for name, parameter in layer.named_parameters(prefix.replace(BASE, ""), recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield Weight(name, parameter, None)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[nn.Module]:
    """Inside the context ``model`` computes with its base weights alone; for passes without
    gradients.

    peft's own switch also clears the adapters' ``requires_grad``, which DeepSpeed and checkpoints
    read.
    """
    layers: list[Any] = [layer for layer in model.modules() if adapter_of(layer) is not None]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield model
    finally:
        for layer in layers:
            layer._disable_adapters = False


def digest(model: nn.Module) -> str:
    """Digest of the weights as bfloat16, so that it does not depend on the dtype of loading."""
    state = xxh3_128()
    for name, parameter in model.named_parameters():
        values = parameter.detach().to("cpu", torch.bfloat16).contiguous()
        state.update(name.encode())
        state.update(values.view(torch.int16).numpy().data)
    return state.hexdigest()


def write_adapter(model: nn.Module, folder: Path) -> None:
    """``adapter_model.safetensors`` and ``adapter_config.json`` as
    ``peft.PeftModel.from_pretrained`` reads them.
    """
    tensors = {
        "base_model.model." + name.replace(f".{NAME}.", "."): parameter.detach().cpu().contiguous()
        for name, parameter in model.named_parameters()
        if ".lora_" in name
    }
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    model.peft_config[NAME].save_pretrained(str(folder))  # type: ignore[union-attr, index]


def _targets(model: nn.Module, wanted: Literal["all-linear"] | Sequence[str]) -> list[str]:
    """Names of the layers to adapt. The head is not among them: it may be tied to the embedding."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    linear = (n for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head)
    known = list(dict.fromkeys(name.rsplit(".", 1)[-1] for name in linear))
    if isinstance(wanted, str):
        return known
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise UserError(
            f"{KEY}: the model has no linear layer named {', '.join(unknown)}, but "
            f"{', '.join(known)}; {ALL} means all of these"
        )
    return list(wanted)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
