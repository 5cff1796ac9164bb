"""RoMa (package romatch 0.1.2): dense matches between two frames; spec scorers, section 4.

An item is a two-frame video with `points` (N, 2), x and y in pixels of the first frame. Out come `end` (N, 2), where
each is in the second, `back` (N, 2), where that is when matched back, and `confidence` (N,), the lesser certainty of
both ways. With `about["sample"] = n` instead of points: `first`, `second` (n, 2) and `confidence` of n sampled matches.

What users of the package met: its own kernel needs another CUDA than the one installed (used only where it can be
imported); it counts pixel *edges*, half a pixel from everybody else's centres; sampling draws from the global generator
(seeded for each item); where it is certain of nothing, sampling raises (the item has failed with that reason).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.scorers.worker.adapters.common import (
    load_state,
    resolve_device,
    seed_all,
    versions,
    weights_identity,
)
from pipeline.scorers.worker.protocol import Failed, Item, Outcome

ADAPTER = 1
WEIGHTS, DINO = "roma_outdoor.pth", "dinov2_vitl14_pretrain.pth"


def custom_kernel() -> bool:
    """Whether RoMa's own CUDA kernel works here: it is a package of its own and fails to load beside another CUDA."""
    try:
        importlib.import_module("local_corr")
    except (ImportError, OSError):
        return False
    return True


def to_unit(points_N2: NDArray[Any], width: int, height: int) -> NDArray[np.float32]:
    """Pixels (centres are whole numbers) -> RoMa's -1..1, whose ends are the outer edges of the frame."""
    return ((np.asarray(points_N2, np.float64) + 0.5) * 2 / np.array([width, height]) - 1).astype(np.float32)


def to_pixels(unit_N2: NDArray[Any], width: int, height: int) -> NDArray[np.float32]:
    """The inverse of `to_unit`."""
    return ((np.asarray(unit_N2, np.float64) + 1) / 2 * np.array([width, height]) - 0.5).astype(np.float32)


def in_full_precision() -> None:
    """On a CPU: RoMa's sampling measures distances in half precision, which no CPU kernel does."""
    from functools import partial

    from romatch.models import matcher
    from romatch.utils.kde import kde

    matcher.kde = partial(kde, half=False)


class RoMa:
    def __init__(self, settings: dict[str, Any], device: str) -> None:
        from romatch import roma_outdoor

        self.device = resolve_device(device)
        folder, self.weights = weights_identity(settings, (WEIGHTS, DINO))
        self.version = versions("romatch", ADAPTER)
        upsample = settings["upsample"]
        self.model = roma_outdoor(
            device=self.device,
            weights=load_state(folder / WEIGHTS),
            dinov2_weights=load_state(folder / DINO),
            coarse_res=int(settings["resolution"]),
            upsample_res=int(upsample) if upsample else int(settings["resolution"]),
            upsample_preds=bool(upsample),
            symmetric=True,
            use_custom_corr=custom_kernel(),
        ).eval()
        if self.device == "cpu":
            in_full_precision()

    def measure(self, items: Sequence[Item]) -> Iterator[Outcome]:
        for item in items:
            seed_all(item.seed)
            if len(item.video_FHW3) != 2:
                yield Failed(f"roma matches two frames, got {len(item.video_FHW3)}")
                continue
            yield self._pair(item)

    def _pair(self, item: Item) -> Outcome:
        import torch
        from PIL import Image

        height, width = item.video_FHW3.shape[1:3]
        first, second = (Image.fromarray(frame) for frame in item.video_FHW3)
        with torch.inference_mode():
            warp, certainty = self.model.match(first, second)
            warp, certainty = (
                warp[0],
                certainty[0],
            )  # (H, 2W, 4) and (H, 2W): first to second, second to first
            if "sample" in item.about:
                return self._sample(warp, certainty, int(item.about["sample"]), width, height)
            half = warp.shape[1] // 2
            points = np.asarray(item.arrays["points"], np.float32)
            end, sure = self._look_up(warp[:, :half, 2:], certainty[:, :half], to_unit(points, width, height))
            # the second half runs the other way: its first two columns are where a place of the second frame came from
            back, again = self._look_up(warp[:, half:, :2], certainty[:, half:], end)
        return {
            "end": to_pixels(end, width, height),
            "back": to_pixels(back, width, height),
            "confidence": np.minimum(sure, again),
        }

    def _look_up(
        self, warp_HW2: Any, certainty_HW: Any, at_N2: NDArray[Any]
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Warp and certainty at places in -1..1, between the cells' centres; certainty is 0 outside the frame."""
        import torch
        import torch.nn.functional as F

        place = torch.from_numpy(np.asarray(at_N2, np.float32)).to(warp_HW2.device)[None, None]
        stacked = torch.cat([warp_HW2, certainty_HW[..., None]], dim=-1).float().permute(2, 0, 1)[None]
        found = F.grid_sample(stacked, place, mode="bilinear", padding_mode="border", align_corners=False)[
            0, :, 0
        ].T
        outside = (place[0, 0].abs() > 1).any(-1)
        rows = found.cpu().numpy()
        return rows[:, :2], np.where(outside.cpu().numpy(), 0, rows[:, 2]).astype(np.float32)

    def _sample(self, warp: Any, certainty: Any, count: int, width: int, height: int) -> Outcome:
        if not bool((certainty > 0).any()):
            return Failed("roma is certain of no match")
        matches, confidence = self.model.sample(warp, certainty, num=count)
        rows = matches.float().cpu().numpy()
        return {
            "first": to_pixels(rows[:, :2], width, height),
            "second": to_pixels(rows[:, 2:], width, height),
            "confidence": confidence.float().cpu().numpy(),
        }


def load(settings: dict[str, Any], device: str) -> RoMa:
    return RoMa(settings, device)
