"""Small scorer networks on disk: one safetensors file and one JSON file with the sizes to rebuild it from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
import torch
from torch import nn

from pipeline import files
from pipeline.allocator import keep_freed_memory
from pipeline.errors import CheckpointError, DataError

T = TypeVar("T")


def save_module(folder: Path, name: str, module: nn.Module, config: dict[str, Any]) -> None:
    """Write `name`.safetensors (fp32) and then `name`.json, each atomically. Raises StorageError."""
    state = {key: value.detach().cpu().float().contiguous() for key, value in module.state_dict().items()}
    files.write_bytes(folder / f"{name}.safetensors", safetensors.torch.save(state, {"format": "pt"}))
    files.write_json(folder / f"{name}.json", config)


def load_module(
    folder: Path, name: str, build: Callable[[dict[str, Any]], T], module_of: Callable[[T], nn.Module]
) -> T:
    """Rebuild what `save_module` wrote; `module_of` finds the module inside the built object.

    Raises CheckpointError naming the file, and the key where weights do not fit.
    """
    weights, remedy = folder / f"{name}.safetensors", "restore the shipped weights or train the scorer again"
    try:
        built = build(files.read_json(folder / f"{name}.json", remedy))
    except DataError as error:
        raise CheckpointError(str(error)) from error
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder / f'{name}.json'}: does not describe a {name} ({error}); {remedy}"
        ) from error
    try:
        state = safetensors.torch.load_file(weights)
    except FileNotFoundError as error:
        raise CheckpointError(f"{weights}: is missing; {remedy}") from error
    except Exception as error:  # safetensors raises its own untyped error for a truncated or foreign file
        raise CheckpointError(f"{weights}: is not a complete safetensors file ({error}); {remedy}") from error
    module = module_of(built)
    load_strict(module, state, weights, remedy)
    if all(parameter.device.type == "cpu" for parameter in module.parameters()):
        keep_freed_memory()
    return built


def load_strict(module: nn.Module, state: dict[str, torch.Tensor], path: Path, remedy: str) -> None:
    """Copy `state` into a module whose keys and shapes must match. Raises CheckpointError naming the first
    that does not."""
    own = module.state_dict()
    for key in sorted({*own, *state}):
        if key not in state:
            raise CheckpointError(f"{path}: key {key!r} is missing; {remedy}")
        if key not in own:
            raise CheckpointError(f"{path}: unknown key {key!r}; {remedy}")
        if own[key].shape != state[key].shape:
            shapes = f"{tuple(state[key].shape)} where {tuple(own[key].shape)} is needed"
            raise CheckpointError(f"{path}: {key!r} has shape {shapes}; {remedy}")
    module.load_state_dict(state)
