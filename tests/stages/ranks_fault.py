"""`wcpipe update` for torchrun with one fault on its way: a program for test_update_ranks.py.

    torchrun --nproc-per-node 2 tests/stages/ranks_fault.py FAULT update --epoch e001 ...

Before optimizer step 2, rank 1 meets FAULT: `kill` (SIGKILL), `signal` (SIGUSR1 to itself), `full` (a full disk, met by
rank 0 when it writes the policy) or `none`.
"""

import errno
import os
import signal
import sys
from typing import Any

from pipeline.updates import checkpoint
from pipeline.updates.policy import Policy
from stages.cli import main

FAULT = sys.argv.pop(1)
step = Policy.optimizer_step


def faulty(policy: Policy) -> float:
    if policy.step == 1 and policy.ranks.index == 1:
        if FAULT == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if FAULT == "signal":
            os.kill(os.getpid(), signal.SIGUSR1)
    return step(policy)


def full(*arguments: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


Policy.optimizer_step = faulty  # type: ignore[method-assign]
if FAULT == "full":
    checkpoint._save = full
main()
