"""Parameters of the real scorers (params.yaml: `score.workers.<name>`); apart from their code, so reading is quick.

Two kinds of numbers: what changes a value is part of what a score was made with (`measured_with`), and how the worker
runs (device, batch, limits) is not: an order of batches may not change a score.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

FIXED_PROMPT = "A high-quality, ultra-detailed and well-structured image."


class WorkerSettings(BaseModel):
    """What all workers share."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    weights: str = Field(
        "", description="folder with the scorer's weights; `wcpipe scorers list` says what goes in"
    )
    device: str = Field(
        "auto", description="auto: the first GPU that this process sees, else the CPU; or cpu, cuda:1"
    )
    batch: int = Field(
        8, ge=1, description="candidates a request; halved by itself when the worker dies of one"
    )
    item_seconds: float = Field(300, gt=0, description="longest time a candidate may take")
    start_seconds: float = Field(900, gt=0, description="longest time until the weights are loaded")
    silence_seconds: float = Field(120, gt=0, description="longest time without a sign of life")
    tries: int = Field(
        2, ge=1, description="tries of a candidate that the worker dies of; then it is missing"
    )
    keep: bool = Field(
        True,
        description="keep the worker between the epochs of `wcpipe run`; false: free its memory after each",
    )

    def measured_with(self) -> dict[str, Any]:
        """The numbers that a value depends on; the weights enter by their digest, not by where they lie."""
        return {name: value for name, value in self.model_dump(mode="json").items() if name not in _RUNNING}


_RUNNING = frozenset(WorkerSettings.model_fields)


class HPSv3Settings(WorkerSettings):
    """HPSv3: which frames are judged and for which prompt."""

    weights: str = Field(
        "weights/hpsv3", description="folder with HPSv3.safetensors and Qwen2-VL-7B-Instruct/"
    )
    prompt: str = Field(FIXED_PROMPT, description="prompt of the rewards quality and quality_drift")
    caption: bool = Field(False, description="judge each frame for the scene's caption too (quality_caption)")
    every: int | None = Field(
        None, ge=1, description="judge every n-th new frame; empty: the last frame of each latent"
    )
    images: int = Field(4, ge=1, description="frames a forward of the model: bounds its memory")

    def measured_with(self) -> dict[str, Any]:
        return {name: value for name, value in super().measured_with().items() if name != "images"}


class DepthAnything3Settings(WorkerSettings):
    """Depth-Anything-3: the size it works at, and how many frames it sees at once."""

    weights: str = Field(
        "weights/da3-base", description="folder with config.json and model.safetensors of DA3-BASE"
    )
    resolution: int = Field(504, ge=14, multiple_of=14, description="longer side in pixels")
    chunk: int = Field(64, ge=2, description="frames a call; longer clips are joined at a shared frame")


class CoTrackerSettings(WorkerSettings):
    """CoTracker3: whole videos or windows, and the size it works at."""

    weights: str = Field(
        "weights/cotracker", description="folder with scaled_offline.pth or scaled_online.pth"
    )
    mode: Literal["offline", "online"] = Field(
        "offline", description="online: 16-frame windows, for long videos"
    )
    resolution: list[int] | None = Field(
        None,
        min_length=2,
        max_length=2,
        description="height and width it works at; empty: the package's 384 x 512",
    )


class RoMaSettings(WorkerSettings):
    """RoMa: the sizes of its two passes."""

    weights: str = Field(
        "weights/roma", description="folder with roma_outdoor.pth and dinov2_vitl14_pretrain.pth"
    )
    resolution: int = Field(
        560, ge=112, multiple_of=14, description="side of the coarse pass; others lose matches"
    )
    upsample: int = Field(864, ge=0, description="side of the fine pass; 0: none")


SETTINGS: dict[str, type[WorkerSettings]] = {
    "hpsv3": HPSv3Settings,
    "depth-anything-3": DepthAnything3Settings,
    "cotracker": CoTrackerSettings,
    "roma": RoMaSettings,
}


def worker_settings(name: str, sections: Mapping[str, Any]) -> WorkerSettings:
    """The settings of a worker from params.yaml's `score.workers`. Raises pydantic's ValidationError."""
    return SETTINGS[name].model_validate_json(json.dumps(sections.get(name) or {}), strict=True)
