"""Frames of any world at the size that an engine was trained on.

The embedded engines know frames of 40 x 64 pixels only; published worlds make 480 x 832 and more. Measuring those with
them means little (they have seen rooms of the mini world and nothing else), but it must run, and there is one place
where frames change their size: here, called by `registry.measure_group`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

CHUNK = 16  # frames that are float32 at a time: 16 of 704 x 1280 are 170 MB


def fit_frames(frames_FHW3: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    """Frames [..., H, W, 3] -> [..., height, width, 3], antialiased, without cropping; the same array if they fit."""
    if frames_FHW3.shape[-3:-1] == size:
        return frames_FHW3
    import torch
    from torch.nn import functional as F

    flat = frames_FHW3.reshape(-1, *frames_FHW3.shape[-3:])
    out = np.empty((len(flat), *size, 3), np.uint8)
    for start in range(0, len(flat), CHUNK):
        part = torch.from_numpy(np.ascontiguousarray(flat[start : start + CHUNK])).permute(0, 3, 1, 2).float()
        scaled = F.interpolate(part, size, mode="bilinear", antialias=True, align_corners=False)
        pixels = scaled.add(0.5).clamp(0, 255).to(torch.uint8)  # rounded
        out[start : start + CHUNK] = pixels.permute(0, 2, 3, 1).numpy()
    return out.reshape(*frames_FHW3.shape[:-3], *size, 3)
