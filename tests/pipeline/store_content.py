"""Deterministic contents for the store tests; without torch, so that the processes that get killed start quickly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pipeline.stores import ArraySpec, GroupStore, Shard

ARRAYS = [
    ArraySpec("frames", (3, 2, 8, 10, 3), "uint8", per_candidate=True),
    ArraySpec("latents", (3, 5, 2, 2, 2), "bfloat16", per_candidate=True),
    ArraySpec("w2c", (2, 4, 4), "float64"),
]
GROUPS = 6
KEYS = [f"group{index}" for index in range(GROUPS)]


def content(index: int) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, Any]]:
    """Deterministic content of one group; group 1 is all zeros (it must still leave files)."""
    rng = np.random.default_rng(index)
    scale = 0 if index == 1 else 1
    arrays = {
        "frames": (rng.integers(0, 256, (3, 2, 8, 10, 3)) * scale).astype(np.uint8),
        "latents": (rng.integers(0, 1 << 15, (3, 5, 2, 2, 2)) * scale).astype(np.uint16),
        "w2c": rng.normal(size=(2, 4, 4)) * scale,
    }
    return arrays, {"word": f"w-{index}", "forwards": index}


def prepare(path: Path, inputs: dict[str, Any] | None = None) -> GroupStore:
    return GroupStore.prepare(path, kind="rollouts", arrays=ARRAYS, keys=KEYS, inputs=inputs or {"steps": 5})


def fill(path: Path, shard: Shard = Shard()) -> GroupStore:
    store = prepare(path)
    for index in store.pending(shard):
        store.write(index, *content(index))
    return store
