"""How arrays of groups lie on disk: a group, or a block of groups, is one shard; a candidate is one chunk inside it.

Measured in spec cluster C: zarr-python writes a shard atomically (temporary file and rename), a checksum inside the
chunk turns a flipped byte from a silently wrong number into an error, video compresses well with lz4 at little cost
and float latents hardly compress at all. bfloat16 has no zarr type: its bits travel as uint16.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

BFLOAT16 = "bfloat16"


@dataclass(frozen=True)
class ArraySpec:
    """One array of a store, described for a single group.

    shape           of one group, without the leading group axis
    dtype           a numpy name, or "bfloat16" (kept as its uint16 bits)
    per_candidate   the first axis of `shape` is G, and each candidate is its own chunk inside the group's shard
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    per_candidate: bool = False

    @property
    def stored_dtype(self) -> np.dtype[Any]:
        return np.dtype("uint16" if self.dtype == BFLOAT16 else self.dtype)

    @property
    def compressed(self) -> bool:
        return self.dtype == "uint8"

    def chunks(self) -> tuple[int, ...]:
        inner = (1, *self.shape[1:]) if self.per_candidate else self.shape
        return (1, *inner)

    def shards(self, block: int = 1) -> tuple[int, ...] | None:
        """Shape of a shard of `block` groups; None when it is a single chunk, whose file is then the atomic unit."""
        several = block > 1 or (self.per_candidate and self.shape[0] > 1)
        return (block, *self.shape) if several else None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "shape": list(self.shape)}

    @staticmethod
    def from_json(data: dict[str, Any]) -> ArraySpec:
        return ArraySpec(data["name"], tuple(data["shape"]), data["dtype"], data["per_candidate"])


def to_array(tensor: torch.Tensor, dtype: str) -> NDArray[Any]:
    """A tensor as the numpy array that an ArraySpec of `dtype` stores (bfloat16 as uint16 bits), on the CPU."""
    import torch

    if dtype == BFLOAT16:
        bits = tensor.detach().cpu().to(torch.bfloat16).contiguous().view(torch.int16).numpy()
        return bits.view(np.uint16)
    return tensor.detach().cpu().to(getattr(torch, dtype)).contiguous().numpy()


def to_tensor(array: NDArray[Any], dtype: str) -> torch.Tensor:
    """The inverse of `to_array`: bfloat16 bits come back exactly."""
    import torch

    contiguous = np.ascontiguousarray(array)
    if dtype == BFLOAT16:
        return torch.from_numpy(contiguous.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(contiguous)
