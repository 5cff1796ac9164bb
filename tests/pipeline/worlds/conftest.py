"""One thread for parity with stored outputs.

Threads split the sums of a matrix product, and the 8B's golden case is ill-conditioned enough (in double precision its
outputs are off by 1e-4) for that to show: 7.6e-6 with one thread, 1.05e-5 with two.
"""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
