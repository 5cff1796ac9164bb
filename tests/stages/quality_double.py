"""A quality scorer for the score stage's tests, run by a real worker: brightness of each frame. It dies of some videos.

`settings.weights` is a folder; a file `deadly` in it lists videos (crc32) that kill the worker.
"""

from __future__ import annotations

import os
import signal
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.scorers.worker.protocol import Item, Outcome


class Brightness:
    version, weights = "brightness 1", "none"

    def __init__(self, folder: Path) -> None:
        self.deadly = folder / "deadly"
        self.asked = folder / "asked"

    def measure(self, items: Sequence[Item]) -> Iterator[Outcome]:
        for item in items:
            name = str(zlib.crc32(item.video_FHW3.tobytes()))
            with self.asked.open("a") as file:
                file.write(f"{name}\n")
            if self.deadly.exists() and name in self.deadly.read_text().split():
                os.kill(os.getpid(), signal.SIGKILL)
            score = item.video_FHW3.reshape(len(item.video_FHW3), -1).mean(axis=1, dtype=np.float64)
            yield {"score": np.stack([score + len(prompt) for prompt in item.about["prompts"]])}


def load(settings: dict[str, Any], device: str) -> Brightness:
    return Brightness(Path(settings["weights"]))
