"""CoTracker3 (package cotracker, from its git line): points followed through frames; spec scorers, section 3.

An item is a video with `queries` (N, 3): frame, x, y. Out come `tracks` (F, N, 2) in pixels (centres are whole numbers)
and `visible` (F, N), 0 or 1, the predictor's own opinion. The stage follows pairs of frames: two-frame videos, there
and, turned round, back.

What users of the package met: integer queries give garbage without an error (always float32 here); no queries means a
dense mode that divides by zero on small frames (queries are required); the online model keeps its state from one video
to the next (a first step before every video); a long video runs out of memory (the online model walks through it in
windows); points outside the frame are found again at absurd places (they count as lost).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.scorers.worker.adapters.common import resolve_device, seed_all, versions, weights_identity
from pipeline.scorers.worker.protocol import Failed, Item, Outcome

ADAPTER = 1
OFFLINE, ONLINE = "scaled_offline.pth", "scaled_online.pth"
REMEDY = "install it with `wcpipe scorers install cotracker` (from its git line: PyPI has no such package)"


class CoTracker:
    """`settings.mode`: offline (whole videos at once) or online (windows, for long ones)."""

    def __init__(self, settings: dict[str, Any], device: str) -> None:
        try:
            from cotracker.predictor import CoTrackerOnlinePredictor, CoTrackerPredictor
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"{error}; {REMEDY}") from error
        self.device = resolve_device(device)
        self.online = settings["mode"] == "online"
        name = ONLINE if self.online else OFFLINE
        folder, self.weights = weights_identity(settings, (name,))
        self.version = versions("cotracker", ADAPTER)
        checkpoint = self._checked(folder / name)
        model = (
            CoTrackerOnlinePredictor(checkpoint=checkpoint)
            if self.online
            else CoTrackerPredictor(checkpoint=checkpoint, offline=True)
        )
        self.model = model.to(self.device).eval()
        if settings.get("resolution"):
            height, width = settings["resolution"]
            self.model.interp_shape = (int(height), int(width))

    @staticmethod
    def _checked(path: Path) -> str:
        """The path, after its content was read without executing any of it; the package itself loads it unchecked."""
        from pipeline.scorers.worker.adapters.common import load_state

        load_state(path)
        return str(path)

    def measure(self, items: Sequence[Item]) -> Iterator[Outcome]:
        for item in items:
            seed_all(item.seed)
            yield self._video(item.video_FHW3, np.asarray(item.arrays["queries"], np.float32))

    def _video(self, video_FHW3: NDArray[np.uint8], queries_N3: NDArray[np.float32]) -> Outcome:
        import torch

        frames, height, width = video_FHW3.shape[:3]
        if queries_N3.ndim != 2 or queries_N3.shape[1] != 3 or not np.isfinite(queries_N3).all():
            return Failed(f"queries are finite rows of frame, x, y, got shape {queries_N3.shape}")
        if not len(queries_N3):
            return {
                "tracks": np.zeros((frames, 0, 2), np.float32),
                "visible": np.zeros((frames, 0), np.float32),
            }
        video = (
            torch.from_numpy(np.ascontiguousarray(video_FHW3))
            .permute(0, 3, 1, 2)[None]
            .float()
            .to(self.device)
        )
        queries = torch.from_numpy(queries_N3)[None].to(self.device)
        with torch.inference_mode():
            found = self._online(video, queries) if self.online else self.model(video, queries=queries)
        tracks, seen = (part[0].float().cpu().numpy() for part in found)
        inside = (tracks >= -0.5).all(-1) & (tracks[..., 0] <= width - 0.5) & (tracks[..., 1] <= height - 0.5)
        return {"tracks": tracks, "visible": (seen * inside).astype(np.float32)}

    def _online(self, video_BF3HW: Any, queries_BN3: Any) -> tuple[Any, Any]:
        """Windows of 2 * step frames, the last one filled up with the last frame; the first call resets the state."""
        import torch

        step, frames = int(self.model.step), video_BF3HW.shape[1]
        count = max(2 * step, -(-frames // step) * step)
        last = video_BF3HW[:, -1:].expand(-1, count - frames, -1, -1, -1)
        video = torch.cat([video_BF3HW, last], dim=1)
        self.model(video_chunk=video[:, : 2 * step], is_first_step=True, queries=queries_BN3)
        tracks = visible = None
        for start in range(0, count - step, step):
            tracks, visible = self.model(video_chunk=video[:, start : start + 2 * step])
        assert tracks is not None
        assert visible is not None
        return tracks[:, :frames], visible[:, :frames]


def load(settings: dict[str, Any], device: str) -> CoTracker:
    return CoTracker(settings, device)
