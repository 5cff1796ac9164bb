"""Depth-Anything-3 (package depth-anything-3 0.1.1): camera poses of a clip; spec scorers, section 2.

Out come camera-to-world poses in OpenCV axes relative to frame 0, in units of the *median depth of one frame*, which
the request names. WHY: each call of an any-view model has a scale of its own. Candidates of a group, and the clips
before them, share a frame; measured in that frame's depth they share their unit, and one factor a scene then maps all
of them to the world (`rewards.action.scale: scene`). No Umeyama anywhere: it has no solution on a straight or standing
path, which world models produce all the time, and the package's own alignment raises there, so no poses are passed in.

What users of the package met: extrinsics are (N, 3, 4) world-to-camera although the documentation says 4x4; frame 0 is
not the identity; mono and metric models return None for poses; `is_metric` is an empty dict for any-view models; a
nested model is metric already; hundreds of frames run out of memory (chunks that share one frame).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.scorers.worker.adapters.common import resolve_device, seed_all, versions, weights_identity
from pipeline.scorers.worker.protocol import Failed, Item, Outcome

ADAPTER = 1
FILES = ("config.json", "model.safetensors")


def to_c2w(extrinsics_N34: NDArray[Any]) -> NDArray[np.float64]:
    """World-to-camera (N, 3, 4) or (N, 4, 4) -> camera-to-world (N, 4, 4) relative to frame 0."""
    w2c = np.asarray(extrinsics_N34, np.float64)
    if w2c.ndim != 3 or w2c.shape[1:] not in ((3, 4), (4, 4)):
        raise ValueError(f"extrinsics of shape {w2c.shape}: (N, 3, 4) is known")
    full = np.tile(np.eye(4), (len(w2c), 1, 1))
    full[:, :3] = w2c[:, :3]
    c2w = full[0] @ np.linalg.inv(full)
    c2w[0] = np.eye(4)
    return np.asarray(c2w)


def scale_to(depth_HW: NDArray[Any], confidence_HW: NDArray[Any] | None) -> float:
    """The unit of a call: the median depth of one frame, over the surer half of its pixels. NaN where there is none."""
    depth = np.asarray(depth_HW, np.float64)
    sure = np.isfinite(depth) & (depth > 0)
    if confidence_HW is not None:
        confidence = np.asarray(confidence_HW, np.float64)
        known = np.isfinite(confidence)
        sure &= known & (confidence >= (np.median(confidence[known]) if known.any() else np.inf))
    return float(np.median(depth[sure])) if sure.any() else float("nan")


def chunks(frames: int, size: int) -> list[tuple[int, int]]:
    """Ranges (start, stop) of at most `size` frames that share one frame with their predecessor."""
    ranges, start = [], 0
    while True:
        stop = min(start + size, frames)
        ranges.append((start, stop))
        if stop == frames:
            return ranges
        start = stop - 1


class DepthAnything3:
    """Values of an item: `c2w` float64 (F, 4, 4), in units of the median depth of frame `about["unit_frame"]`."""

    def __init__(self, settings: dict[str, Any], device: str) -> None:
        from depth_anything_3.api import DepthAnything3 as Model

        self.device = resolve_device(device)
        folder, self.weights = weights_identity(settings, FILES)
        self.version = versions("depth-anything-3", ADAPTER)
        self.resolution, self.chunk = int(settings["resolution"]), int(settings["chunk"])
        self.model = Model.from_pretrained(str(folder)).to(self.device).eval()

    def measure(self, items: Sequence[Item]) -> Iterator[Outcome]:
        for item in items:
            seed_all(item.seed)
            yield self._video(item.video_FHW3, int(item.about["unit_frame"]))

    def _video(self, video_FHW3: NDArray[np.uint8], unit_frame: int) -> Outcome:
        count = len(video_FHW3)
        unit_frame %= count
        poses = np.tile(np.eye(4), (count, 1, 1))
        units = np.full(count, np.nan)  # the shared unit, as the call of each chunk sees frame `unit_frame`
        factor, before = (
            1.0,
            np.eye(4),
        )  # units of the first chunk per unit of this one; pose of its first frame
        last_unit = float("nan")
        for start, stop in chunks(count, self.chunk):
            found = self._call(video_FHW3[start:stop])
            if isinstance(found, Failed):
                return found
            c2w, depth_units = found
            if start:
                factor *= last_unit / depth_units[0]  # the shared frame has one depth
            c2w[:, :3, 3] *= factor
            poses[start:stop] = before @ c2w
            units[start:stop] = depth_units * factor
            before, last_unit = poses[stop - 1], depth_units[-1]
        unit = units[unit_frame]
        if not (np.isfinite(unit) and unit > 0 and np.isfinite(poses).all()):
            return Failed("depth-anything-3: a pose or the depth of the shared frame is not finite")
        poses[:, :3, 3] /= unit
        return {"c2w": poses, "unit": np.array(unit)}

    def _call(
        self, frames_NHW3: NDArray[np.uint8]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]] | Failed:
        import torch

        if len(frames_NHW3) < 2:
            return Failed("depth-anything-3 needs at least two frames to find a motion")
        with torch.inference_mode():
            found = self.model.inference(
                image=list(frames_NHW3), process_res=self.resolution, export_dir=None
            )
        if found.extrinsics is None:
            return Failed(
                "depth-anything-3: this model gives no poses (mono and metric ones do not): use DA3-BASE"
            )
        conf = found.conf
        units = [scale_to(depth, None if conf is None else conf[i]) for i, depth in enumerate(found.depth)]
        return to_c2w(found.extrinsics), np.array(units)


def load(settings: dict[str, Any], device: str) -> DepthAnything3:
    return DepthAnything3(settings, device)
