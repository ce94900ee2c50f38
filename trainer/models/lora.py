"""LoRA (Hu et al., arXiv 2106.09685): trained matrices of a low rank beside the model's own
weights, which stay.

Adapters are peft's layers inside the transformers model: its class, its forward pass and the names
of all other weights are as before. Everything else that the project has to know of them is here.
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
    ``seed``: of lora_A.
    """

    rank: int
    alpha: float
    targets: Literal["all-linear"] | Sequence[str] = ALL
    seed: int = 0


@dataclass(frozen=True)
class Adapter:
    """The layer's output has ``scale * x @ down.T @ up.T`` added; ``down`` [rank, in], ``up`` [out,
    rank].
    """

    down: nn.Parameter
    up: nn.Parameter
    scale: float


@dataclass(frozen=True)
class Weight:
    """A weight of the model as it was before it had adapters."""

    name: str
    own: nn.Parameter
    adapter: Adapter | None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What has to be whole when it is ``merged``."""
        return (
            [self.own] if self.adapter is None else [self.own, self.adapter.down, self.adapter.up]
        )

    def merged(self) -> Tensor:
        """W, or W + scale up @ down: added up in float32 and rounded once to the type of W. Without
        gradient.
        """
        own = self.own.detach()
        if self.adapter is None:
            return own
        up, down = self.adapter.up.detach().float(), self.adapter.down.detach().float()
        return torch.addmm(own.float(), up, down, alpha=self.adapter.scale).to(own.dtype)


def add_adapters(model: nn.Module, lora: Lora) -> None:
    """Give ``model`` (transformers) its adapters and freeze everything else. With up = 0 it
    computes what it did.

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
    """The adapter of a linear layer; None where it has none."""
    downs: Any = layer._modules.get("lora_A")
    if downs is None:
        return None
    wrapped: Any = layer
    return Adapter(downs[NAME].weight, wrapped.lora_B[NAME].weight, float(wrapped.scaling[NAME]))


def weights(model: nn.Module) -> Iterator[Weight]:
    """The weights under the names and in the order that ``named_parameters`` had without adapters:
    tied ones once.
    """
    seen: set[int] = set()
    for prefix, layer in model.named_modules():
        adapter = adapter_of(layer)
        if adapter is not None:
            seen |= {id(adapter.down), id(adapter.up)}
            own: Any = layer
            seen.add(id(own.base_layer.weight))
            yield Weight(_join(prefix, "weight"), own.base_layer.weight, adapter)
            continue
        for name, parameter in layer.named_parameters(prefix.replace(BASE, ""), recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield Weight(name, parameter, None)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[nn.Module]:
    """Within: ``model`` computes what it did before it had adapters. Not for a pass that will see a
    ``backward``.

    peft's own switch also takes the adapters' ``requires_grad`` away, which DeepSpeed and a
    checkpoint go by.
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
    """Of the weights' values as bfloat16: the same whatever type the model was loaded in."""
    found = xxh3_128()
    for name, parameter in model.named_parameters():
        found.update(name.encode())
        found.update(
            parameter.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy().data
        )
    return found.hexdigest()


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
    """Names of the layers to adapt. The head is none of them: it may be the embedding as well."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    linear = (n for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head)
    known = list(dict.fromkeys(name.rsplit(".", 1)[-1] for name in linear))
    if isinstance(wanted, str):
        return known
    if unknown := [name for name in wanted if name not in known]:
        raise UserError(
            f"{KEY}: the model has no linear layer named {', '.join(unknown)}, but "
            f"{', '.join(known)}; {ALL} means all "
            "of these"
        )
    return list(wanted)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
