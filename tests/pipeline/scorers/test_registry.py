"""What fails is missing with a reason, and only that is measured again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.errors import CheckpointError, ConfigError
from pipeline.scorers.registry import engine_digest, measure_group, open_engine
from pipeline.stores import ArraySpec

FRAMES = np.zeros((4, 5, 40, 64, 3), np.uint8)
PAST = np.zeros((3, 40, 64, 3), np.uint8)


class Flaky:
    """Scores a candidate by the value of its first pixel; 255 is a NaN, 254 ends the engine."""

    name = "flaky"

    def __init__(self) -> None:
        self.asked = 0

    def arrays(self, candidates: int, frames: int, past_frames: int) -> list[ArraySpec]:
        return [ArraySpec("value", (candidates,), "float32"), ArraySpec("past", (1,), "float32")]

    def measure(
        self, frames_GFHW3: NDArray[np.uint8], past_FHW3: NDArray[np.uint8]
    ) -> dict[str, NDArray[Any]]:
        self.asked += len(frames_GFHW3)
        first = frames_GFHW3[:, 0, 0, 0, 0].astype(np.float32)
        if (first == 254).any():
            raise MemoryError("no room for this video")
        return {"value": np.where(first == 255, np.nan, first).astype(np.float32)}

    def measure_past(self, past_FHW3: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
        return {"past": np.array([7.0], np.float32)}


def videos(*values: int) -> NDArray[np.uint8]:
    frames = FRAMES.copy()
    frames[:, 0, 0, 0, 0] = values
    return frames


def test_a_nan_is_missing_and_its_neighbours_are_not() -> None:
    measured = measure_group(Flaky(), videos(1, 255, 3, 4), PAST, {3: "the sample is not finite"})
    np.testing.assert_array_equal(measured.arrays["value"], np.array([1, np.nan, 3, np.nan], np.float32))
    assert measured.arrays["past"].tolist() == [7.0]
    assert set(measured.reasons) == {1, 3}
    assert "not finite" in measured.reasons[1]


def test_a_crash_leaves_all_missing_with_its_error_and_a_retry_measures_only_those() -> None:
    engine = Flaky()
    crashed = measure_group(engine, videos(1, 254, 3, 4), PAST, {3: "the sample is not finite"})
    assert np.isnan(crashed.arrays["value"]).all()
    assert crashed.reasons[0] == "MemoryError: no room for this video"
    engine.asked = 0
    again = measure_group(engine, videos(1, 255, 3, 4), PAST, {3: "the sample is not finite"}, crashed)
    assert engine.asked == 3
    third = measure_group(engine, videos(9, 2, 9, 9), PAST, {3: "the sample is not finite"}, again)
    assert engine.asked == 4
    assert third.arrays["value"][:3].tolist() == [1, 2, 3]  # what was known stays
    assert set(third.reasons) == {3}


@pytest.mark.parametrize(("name", "shape"), [("pose", (4, 4, 4, 4)), ("critic", (4, 5))])
def test_embedded_engines_fill_the_arrays_they_declare(
    tiny_base: Path, name: str, shape: tuple[int, ...]
) -> None:
    engine = open_engine(name, tiny_base)
    measured = measure_group(engine, FRAMES, PAST, {})
    for spec in engine.arrays(4, 5, 3):
        assert measured.arrays[spec.name].shape == spec.shape
        assert np.isfinite(measured.arrays[spec.name]).all()
    assert measured.arrays[engine.arrays(4, 5, 3)[0].name].shape == shape
    assert measured.reasons == {}


def test_engines_are_named_and_have_an_identity(tiny_base: Path, tmp_path: Path) -> None:
    assert engine_digest("pose", tiny_base) != engine_digest("critic", tiny_base)
    with pytest.raises(ConfigError, match="unknown scorer 'depth'; known: pose, critic"):
        open_engine("depth", tiny_base)
    with pytest.raises(CheckpointError, match=r"pose_net\.safetensors: is missing"):
        engine_digest("pose", tmp_path)
