"""Several processes as one update: what they agree on, how weights are sharded, how an error of one ends them all.

The collectives inside the network (FSDP gathers a block's weights before it runs) hang if one rank runs it once more
than another. So nothing is left to luck: the loop asks `most` before every run, and errors and stop requests become
everyone's at the end of an optimizer step (`agreed`, `gather`). A rank that dies cannot ask: the others see their
connection close, and `watched` says so in one line.
"""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from pipeline.errors import ConfigError, WcpipeError
from pipeline.updates.environment import EndedElsewhere, Place, place

T = TypeVar("T")
# Longer than it takes rank 0 to write one file of a checkpoint while the others wait (42 GB of moments for a whole 5B).
PATIENCE = timedelta(hours=1)
_LOST = re.compile(r"gloo|nccl|connection (closed|reset|refused)|timed out|broken pipe|socket", re.IGNORECASE)


class RankLost(WcpipeError):
    """Another process of the update died or cannot be reached; the previous policy is untouched."""

    exit_code = 12


class Ranks:
    """The processes of an update. `Ranks()` is one process alone, for which every method is free and exact."""

    def __init__(self, where: Place | None = None, shard: int | None = None) -> None:
        where = where or Place()
        self.index, self.size, self.shard = where.rank, where.size, shard or where.size

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes checkpoints, metrics and the summary."""
        return self.index == 0

    def gather(self, value: T) -> list[T]:
        """The value (any small Python object) of every rank, by rank, on every rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def most(self, count: int) -> int:
        """The largest count of any rank: how often all of them have to do something."""
        return count if self.size == 1 else max(self.gather(count))

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Every rank runs the block; a WcpipeError of any ends all. Only the first of the failing ranks has the words.

        The block may contain collectives only where all ranks fail alike.
        """
        if self.size == 1:
            yield
            return
        error: WcpipeError | None = None
        try:
            yield
        except WcpipeError as caught:
            error = caught
        codes = self.gather(None if error is None else error.exit_code)
        failed = [rank for rank, code in enumerate(codes) if code is not None]
        if failed and error is not None and failed[0] == self.index:
            raise error
        if failed:
            raise EndedElsewhere(int(codes[failed[0]] or 1)) from error

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Turn the many forms of "the other side is gone" into RankLost."""
        try:
            yield
        except RuntimeError as error:
            if self.size == 1 or not (isinstance(error, dist.DistError) or _LOST.search(str(error))):
                raise
            first = str(error).strip().splitlines()[0]
            raise RankLost(
                f"rank {self.index} of {self.size} lost the others ({first}): one of them ended, see its own lines; "
                "the steps of this update are lost, nothing was written, the previous policy is untouched; "
                "run the same command again"
            ) from error


@contextmanager
def joined(shard: int | None = None) -> Iterator[Ranks]:
    """The ranks of this process's environment, connected while the block runs; `Ranks()` outside of torchrun.

    `shard` is how many neighbouring ranks share one copy of the weights; None: those of a node. Raises ConfigError when
    it does not divide the number of ranks, RankLost when the others cannot be reached.
    """
    where = place()
    if where.size == 1:
        yield Ranks()
        return
    shard = (
        (where.local_size if where.size % where.local_size == 0 else where.size) if shard is None else shard
    )
    if where.size % shard:
        raise ConfigError(f"update.execution.shard is {shard}, which does not divide the {where.size} ranks")
    ranks = Ranks(where, shard)
    with ranks.watched():
        backend = "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(where.local_rank % torch.cuda.device_count())
            backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, timeout=PATIENCE)
        ended = False
        try:
            yield ranks
            ended = True
        finally:
            if ended or backend == "gloo":  # after an error NCCL would wait for ranks that never come
                dist.destroy_process_group()


def distribute(model: nn.Module, ranks: Ranks) -> None:
    """Shard the network (FSDP2), block by block, in place, where it is; nothing for one rank.

    Weights keep their dtype and gradients are averaged in it. Everything is resharded after every run, the root too: a
    weight that stayed gathered would be run again under the next weight set.
    """
    if ranks.size == 1:
        return
    # networks return views, and nothing here works on them in place
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    kinds = set(getattr(model, "_repeated_blocks", None) or ())
    blocks = [module for module in model.modules() if type(module).__name__ in kinds]
    mesh = _mesh(next(model.parameters()).device.type, ranks)
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)


def _mesh(device: str, ranks: Ranks) -> DeviceMesh:
    copies = ranks.size // ranks.shard
    if copies == 1:
        return init_device_mesh(device, (ranks.size,), mesh_dim_names=("shard",))
    return init_device_mesh(device, (copies, ranks.shard), mesh_dim_names=("replicate", "shard"))


def part_of(like: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor that every rank has in full, as `like` is sharded; `full` itself for one rank."""
    if not isinstance(like, DTensor):
        return full
    moved = full.to(like.device)
    return distribute_tensor(moved, like.device_mesh, like.placements, src_data_rank=None).to_local()


def as_sharded(like: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A shard as the tensor that it is a part of, without copy or communication."""
    if not isinstance(like, DTensor):
        return local
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def whole(like: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """The full tensor from every rank's shard, on every rank: all must call it, in the same order."""
    if not isinstance(like, DTensor):
        return local
    found = as_sharded(like, local)
    assert isinstance(found, DTensor)
    return found.full_tensor()


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The shard that this rank holds, sharing memory; the tensor itself where it is not sharded."""
    data = tensor.detach()
    return data.to_local() if isinstance(data, DTensor) else data
