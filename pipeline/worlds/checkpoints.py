"""Strict loading of WorldPlay folders (config.json + safetensors), with errors that name the key and the remedy.

Why not `from_pretrained`: it leaves weights that a file lacks on the meta device and continues. Here the network is
built without memory, every key must be there with its shape, and tensors are mapped, not copied, until used.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from pipeline.errors import CheckpointError
from pipeline.worlds.wan import WorldPlayWan

if TYPE_CHECKING:
    from pipeline.worlds.hunyuan import WorldPlayHunyuan

# What WorldPlay adds to the stock network; a stock Wan folder lacks exactly these.
ADDED = ("action_embedder", "to_out_prope")


def load_wan(
    folder: Path | str,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    add_missing: bool = False,
) -> WorldPlayWan:
    """Load a WorldPlayWan in eval mode from a diffusers folder, strictly.

    `dtype` None keeps the file's; otherwise modules that Wan keeps in fp32 (norms, time embedding) stay fp32.
    `add_missing` accepts a stock Wan folder: the additions start as the identity (zero output), trainable.
    Raises CheckpointError for a missing, truncated or foreign file, an unknown option, or a key that does not fit.
    """
    model = _load(WorldPlayWan, Path(folder), dtype, add_missing)
    _rebuild_rope(model)
    return model.to(device).eval()


def load_hunyuan(
    folder: Path | str,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    add_missing: bool = False,
) -> WorldPlayHunyuan:
    """As `load_wan`, for a WorldPlayHunyuan or (`add_missing`) a stock HunyuanVideo-1.5 folder."""
    # Imported here: a stage of the mini world or the 5B must not pay for it.
    from pipeline.worlds.hunyuan import WorldPlayHunyuan

    return _load(WorldPlayHunyuan, Path(folder), dtype, add_missing).to(device).eval()


def load_network(kind: type[Any], folder: Path | str, device: torch.device | str = "cpu") -> Any:
    """Load any diffusers network (a frame codec) strictly, in eval mode, frozen, in the file's dtype."""
    return _load(kind, Path(folder), None, False).to(device).eval().requires_grad_(False)


def describe_network(kind: type[Any], folder: Path | str) -> Any:
    """The network of a folder's config.json without memory: its shapes and its `config` with defaults filled in."""
    options = read_config(Path(folder) / "config.json", kind)
    with torch.device("meta"):
        return kind(**options)


def _load(kind: type[Any], folder: Path, dtype: torch.dtype | None, add_missing: bool) -> Any:
    model = describe_network(kind, folder)
    tensors = _tensors(folder)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    missing = [name for name in expected if name not in tensors]
    if add_missing and all(any(part in name for part in ADDED) for name in missing):
        tensors |= _identity(model, missing, next(iter(tensors.values())).dtype)
        missing = []
    _check(folder, expected, tensors, missing, kind)
    if dtype is not None:
        tensors = {
            name: tensor.to(torch.float32 if kept_in_fp32(kind, name) else dtype)
            for name, tensor in tensors.items()
        }
    model.load_state_dict(tensors, strict=True, assign=True)
    return model


def kept_in_fp32(kind: type[Any], name: str) -> bool:
    """Whether diffusers keeps this tensor of the class in fp32 when everything else is narrow."""
    return any(part in name.split(".") for part in kind._keep_in_fp32_modules or ())


def read_config(path: Path, kind: type[Any]) -> dict[str, Any]:
    """Options of a network of class `kind` from its config.json. Raises CheckpointError for a foreign or broken one."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path}: missing; give the folder that holds config.json and *.safetensors"
        ) from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error}); copy the folder again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: not a model's configuration; copy the folder again")
    options = {key: value for key, value in content.items() if not key.startswith("_")}
    known = inspect.signature(kind.__init__).parameters
    if unknown := sorted(set(options) - set(known)):
        raise CheckpointError(f"{path}: unknown option {unknown[0]!r}; it is not that of a {kind.__name__}")

    def typed(key: str, value: Any) -> Any:
        """JSON has no tuples: a list becomes one unless the class asks for a list (diffusers adds lists to it)."""
        wants_list = "list" in str(known[key].annotation).lower()
        return tuple(value) if isinstance(value, list) and not wants_list else value

    return {key: typed(key, value) for key, value in options.items()}


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    index = folder / "diffusion_pytorch_model.safetensors.index.json"
    if index.exists():
        files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder}: no *.safetensors in it; copy or export the weights again")
    tensors: dict[str, torch.Tensor] = {}
    for path in files:
        try:
            tensors |= load_file(path)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{path}: missing, although {index.name} names it; copy the folder again"
            ) from error
        except SafetensorError as error:
            raise CheckpointError(f"{path}: truncated or damaged ({error}); copy it again") from error
    return tensors


def _check(
    folder: Path,
    expected: dict[str, tuple[int, ...]],
    tensors: dict[str, torch.Tensor],
    missing: list[str],
    kind: type[Any],
) -> None:
    surplus = [name for name in tensors if name not in expected]
    if missing or surplus:
        what = f"{missing[0]!r} is missing" if missing else f"{surplus[0]!r} is unknown"
        raise CheckpointError(
            f"{folder}: {what} ({len(missing)} keys missing, {len(surplus)} unknown); "
            f"config.json and weights must be of one {kind.__name__}"
        )
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            raise CheckpointError(
                f"{folder}: {name!r} has shape {tuple(tensors[name].shape)}, config.json says {shape}"
            )


def _identity(model: nn.Module, names: list[str], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Zeros, except the action embedder's first layer: with both of its layers zero no gradient would reach it."""
    generator = torch.Generator().manual_seed(0)
    added = {}
    for name in names:
        shape = model.get_parameter(name).shape
        tensor = torch.zeros(shape, dtype=dtype)
        if name.endswith("action_embedder.linear_1.weight"):
            tensor = torch.randn(shape, generator=generator).mul_(shape[1] ** -0.5).to(dtype)
        added[name] = tensor
    return added


def _rebuild_rope(model: WorldPlayWan) -> None:
    """The RoPE tables are computed, not stored: built on the meta device they must be built again."""
    rope = model.rope
    model.rope = type(rope)(rope.attention_head_dim, rope.patch_size, rope.max_seq_len)
