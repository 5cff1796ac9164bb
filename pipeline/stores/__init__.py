"""Artifacts on disk: zarr stores of groups that survive kills, shards and changed inputs. See `store` for the rules."""

from pipeline.stores.schema import ArraySpec, to_array, to_tensor
from pipeline.stores.sharding import Shard, block_size
from pipeline.stores.store import GroupStore
from pipeline.stores.verify import Problem, repair, verify

__all__ = [
    "ArraySpec",
    "GroupStore",
    "Problem",
    "Shard",
    "block_size",
    "repair",
    "to_array",
    "to_tensor",
    "verify",
]
