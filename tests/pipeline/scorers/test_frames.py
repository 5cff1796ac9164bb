"""Frames at an engine's size: antialiased, unchanged where they fit, and used by the embedded engines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.scorers.frames import fit_frames
from pipeline.scorers.registry import measure_group, open_engine


def test_frames_that_fit_are_the_same_array() -> None:
    frames = np.zeros((2, 3, 40, 64, 3), np.uint8)
    assert fit_frames(frames, (40, 64)) is frames


def test_other_sizes_are_scaled_without_aliasing() -> None:
    fine = np.zeros((1, 20, 160, 256, 3), np.uint8)
    fine[:, :, ::2] = 200  # lines of one pixel
    fine[:, :, :, 128:, 0] = 255
    small = fit_frames(fine, (40, 64))
    assert small.shape == (1, 20, 40, 64, 3)
    left = small[0, 0, 4:-4, 4:28].astype(int)
    assert (np.abs(left - 100) <= 2).all()  # grey, not black or white lines
    assert (small[0, 19, :, 40:, 0] == 255).all()
    assert fit_frames(small, (16, 16)).shape == (1, 20, 16, 16, 3)


@pytest.mark.parametrize("name", ["pose", "critic"])
def test_embedded_engines_measure_frames_of_another_world(tiny_base: Path, name: str) -> None:
    """The same numbers as of frames that were scaled before; without scaling the pose network refuses them."""
    engine = open_engine(name, tiny_base)
    frames = np.random.default_rng(0).integers(0, 256, (2, 5, 64, 96, 3), dtype=np.uint8)
    past = frames[0, :3]
    found, small = (
        measure_group(engine, fit(frames), fit(past), {})
        for fit in (lambda x: x, lambda x: fit_frames(x, (40, 64)))
    )
    assert found.reasons == {}
    for key, values in small.arrays.items():
        np.testing.assert_array_equal(found.arrays[key], values)
