"""Keep the memory that a CPU model frees, for its next tensors.

glibc returns large blocks to the kernel as soon as they are free, and a small model's tensors are large blocks: every
forward then pays for fresh, zeroed pages. On the mini world that is a third of a batched rollout (docs/results.md,
costs). Kept memory is used again; the price is that a process holds its peak until it ends, so only models that run on
the CPU ask for it.
"""

import ctypes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # malloc.h
_PAD = 64 * 1024 * 1024


def keep_freed_memory() -> bool:
    """Ask the allocator of this process to keep freed memory; False where it is not glibc's (nothing changes then)."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # macOS, musl
        return False
    return all([mallopt(_MMAP_MAX, 0), mallopt(_TRIM_THRESHOLD, -1), mallopt(_TOP_PAD, _PAD)])
