"""Where this process stands among those that torchrun (or srun with the same variables) started; imports no torch.

Only torchrun's own environment counts - RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT - so
the update knows no scheduler.
"""

import os
from typing import NamedTuple

from pipeline.errors import UsageError, WcpipeError


class EndedElsewhere(WcpipeError):
    """Another rank failed and has said why; this one ends with the same exit code and nothing to add."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("another rank has said why")
        self.exit_code = exit_code


class Place(NamedTuple):
    """Number of this process and how many there are, of all and on this node."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def place() -> Place:
    """From the environment; one process where WORLD_SIZE is not set. Raises UsageError when it does not fit."""
    size = _number("WORLD_SIZE", 1)
    if size == 1:
        return Place()
    found = Place(
        _number("RANK"), size, _number("LOCAL_RANK"), _number("LOCAL_WORLD_SIZE", _number("LOCAL_RANK") + 1)
    )
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise UsageError(
                f"WORLD_SIZE is {size}, but {name} is not set: start the command with torchrun, "
                "or unset WORLD_SIZE for one process"
            )
    if not 0 <= found.rank < size:
        raise UsageError(
            f"RANK is {found.rank}, which is none of WORLD_SIZE = {size}: start it with torchrun"
        )
    return found


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name, "" if default is None else str(default))
    if not text.isdigit():
        raise UsageError(
            f"{name} is {text!r} in the environment, not a number: start the command with torchrun, "
            "or unset WORLD_SIZE for one process"
        )
    return int(text)
