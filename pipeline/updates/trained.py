"""Which weights are trained: all of them, or LoRA adapters beside frozen ones.

LoRA keeps two adapters (peft) in every adapted layer, `policy` and `old`, so that the behaviour policy runs without a
copy of the network and without moving a weight; with adapters off the network is the base. Two traps of peft are closed
here (spec worldplay 5): suffix targets also hit text refiners, so targets are anchored to the layers that an
architecture names in its `lora_scope`; and activating an adapter moves requires_grad to it, so it is put back - under
FSDP a weight that was once gathered without gradient would never get one.
"""

import re
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from pipeline.errors import ConfigError
from pipeline.updates.config import ParamsConfig

POLICY, OLD = "policy", "old"


def prepare_params(model: nn.Module, config: ParamsConfig, seed: int) -> None:
    """Mark what is trained, in place: all weights, or the adapter `policy` on `config.targets` with the rest frozen.

    What is trained becomes float32, whatever the frozen weights are. "All" leaves out what an architecture's
    `never_trained` names, because no gradient reaches it. Adapters start as the identity; their random half is drawn
    from `seed`; `old` starts as a copy of `policy`. Raises ConfigError naming a target that fits no layer.
    """
    if config.kind == "full":
        never = getattr(model, "never_trained", None)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(never is None or not re.match(never, name))
            if parameter.requires_grad:
                parameter.data = _full(parameter.data)
        return
    from peft import LoraConfig, inject_adapter_in_model  # heavy, and only LoRA needs it

    pattern = lora_pattern(model, config.targets)
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # two adapters are meant
        torch.manual_seed(seed)
        for name in (POLICY, OLD):
            lora = LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=pattern)
            inject_adapter_in_model(lora, model, adapter_name=name)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.data = _full(parameter.data)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(f".{POLICY}." in name and ".lora_" in name)
            if f".{OLD}." in name and ".lora_" in name:
                parameter.copy_(model.get_parameter(name.replace(f".{OLD}.", f".{POLICY}.")))
    use_adapter(model, POLICY)


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def lora_pattern(model: nn.Module, targets: list[str]) -> str:
    """Regular expression of the layers that get an adapter, to be matched against whole module names.

    It is the architecture's `lora_scope` (the video side of its blocks; any layer for a class without one) and then a
    name that ends in one of `targets`, such as `to_q`, `attn1.to_q` or `ffn.net.2`. Raises ConfigError naming a target
    without a layer.
    """
    scope = getattr(model, "lora_scope", "")
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    ending = scope + r"(?:.*\.)?"
    for target in targets:
        if not any(re.fullmatch(ending + re.escape(target), name) for name in layers):
            known = sorted({name[found.end() :] for name in layers if (found := re.match(scope, name))})
            raise ConfigError(
                f"update.params.targets: {target!r} names no layer that may have an adapter; "
                f"there are {', '.join(known)}"
            )
    return f"{ending}(?:{'|'.join(map(re.escape, targets))})"


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> parameter, of those with requires_grad. Raises ConfigError if there are none or one is not fp32/fp64."""
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise ConfigError("no parameter of the model is trained: set update.params.kind to full or lora")
    for name, parameter in found.items():
        if parameter.dtype not in (torch.float32, torch.float64):
            raise ConfigError(
                f"trained weight {name!r} is {parameter.dtype}: keep trained weights in float32"
            )
    return found


def old_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The adapter `old` by the names of `policy`; empty for a network without adapters."""
    return {
        name.replace(f".{OLD}.", f".{POLICY}."): parameter
        for name, parameter in model.named_parameters()
        if ".lora_" in name and f".{OLD}." in name
    }


def use_adapter(model: nn.Module, name: str | None) -> None:
    """Run every adapted layer with this adapter, or (None) as the base; what is trained stays what it was."""
    for layer in _adapted(model):
        flags = [(parameter, parameter.requires_grad) for parameter in layer.parameters()]
        layer.enable_adapters(name is not None)
        if name is not None:
            layer.set_adapter(name)
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


def _adapted(model: nn.Module) -> Iterator[Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return (module for module in model.modules() if isinstance(module, BaseTunerLayer))
