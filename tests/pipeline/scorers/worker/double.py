"""A scorer for the protocol's tests, loaded by a real worker process from this file: mean brightness of each frame.

The first pixel of a video commands a misfortune. `misfortunes` (a folder) makes one happen only once.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.scorers.worker.protocol import Failed, Item, Outcome

FINE, RAISES, DIES, HANGS, NAN, FREEZES, FAILED, SLOW = 0, 1, 2, 3, 4, 5, 6, 7


class Double:
    version, weights = "double 1", "none"

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.once = Path(settings["once"]) if settings.get("once") else None

    def again(self, code: int) -> bool:
        """Whether this misfortune has happened before and is to happen only once."""
        if self.once is None:
            return False
        mark = self.once / str(code)
        seen = mark.exists()
        mark.touch()
        return seen

    def measure(self, items: Sequence[Item]) -> Iterator[Outcome]:
        print("a package prints to stdout")  # it must not disturb the answers
        for item in items:
            code = int(item.video_FHW3[0, 0, 0, 0])
            if code and not self.again(code):
                if code == RAISES:
                    raise RuntimeError("cannot read this clip\nsecond line")
                if code == DIES:
                    os.kill(os.getpid(), signal.SIGKILL)
                if code == HANGS:
                    time.sleep(3600)
                if code == FREEZES:
                    os.kill(os.getpid(), signal.SIGSTOP)
                if code == FAILED:
                    yield Failed("no texture")
                    continue
                if code == SLOW:
                    time.sleep(0.4)
            if self.settings.get("seconds"):
                _work(float(self.settings["seconds"]))
            mean = item.video_FHW3[1:].astype(np.float64).mean(axis=(1, 2, 3))
            if code == NAN:
                mean[0] = np.nan
            if self.settings.get("progress"):
                with open(self.settings["progress"], "a") as file:
                    file.write(".")
            pid = np.array(os.getpid() if self.settings.get("pid") else 0)
            yield {"mean": mean, "seed": np.array(item.seed), "pid": pid, **item.arrays}


def _work(seconds: float) -> None:
    """Keep this core busy for that much of its own time."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def load(settings: dict[str, Any], device: str) -> Double:
    if settings.get("refuse"):
        raise FileNotFoundError("weights/double.pt is missing")
    return Double(settings)
