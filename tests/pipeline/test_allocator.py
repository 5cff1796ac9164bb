"""The allocator keeps what a model frees: counted in page faults, not in seconds."""

import subprocess
import sys

import pytest

COUNT = """
import resource, sys
import torch
from pipeline.allocator import keep_freed_memory

torch.set_num_threads(1)
if sys.argv[1] == "keep":
    assert keep_freed_memory()

def work():
    for _ in range(5):
        torch.ones(10_000_000)  # 40 MB, freed at once: glibc keeps up to 32 MB by itself

for _ in range(3):
    work()  # whatever is new comes now
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(mode: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", COUNT, mode], capture_output=True, text=True, check=True, timeout=120
    )
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is glibc's")
def test_freed_tensors_are_used_again_without_new_pages() -> None:
    kept = faults("keep")
    assert kept < 50
    assert faults("default") > 5 * max(kept, 1)  # or the test shows nothing about mallopt
