"""What all adapters need: the device, the identity of the weights, and one seed an item. Imports torch late."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pipeline.scorers.worker.weights import digest_weights


def resolve_device(device: str) -> str:
    """`auto` is the GPU that this process sees first, or the CPU."""
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def weights_identity(settings: dict[str, Any], patterns: Sequence[str]) -> tuple[Path, str]:
    """(folder, digest). Raises FileNotFoundError naming what is missing."""
    folder = Path(settings["weights"])
    cache = settings.get("cache")
    return folder, digest_weights(folder, patterns, Path(cache) if cache else None)


def versions(package: str, adapter: int) -> str:
    """`hpsv3 1.0.0, adapter 1`: raise the adapter's number when its code changes what it measures."""
    try:
        found = version(package)
    except PackageNotFoundError:
        found = "of unknown version"
    return f"{package} {found}, adapter {adapter}"


def seed_all(seed: int) -> None:
    """Before each item: what is random in a package then depends on nothing measured before."""
    import random

    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  packages draw from the global generator
    torch.manual_seed(seed)


def load_state(path: Path) -> dict[str, Any]:
    """Tensors of a .pth file; nothing else in it is ever executed."""
    import torch

    state = torch.load(path, map_location="cpu", weights_only=True)
    state = state.get("model", state) if isinstance(state, dict) else state
    if not isinstance(state, dict):
        raise ValueError(f"{path}: holds a {type(state).__name__}, not a state dict")
    return state
