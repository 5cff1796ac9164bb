"""What fails is missing with a reason, and only that is measured again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.errors import CheckpointError, ConfigError
from pipeline.scorers.registry import ENGINES, EngineKind, engine_digest, measure_group, open_engine
from pipeline.stores import ArraySpec

FRAMES = np.zeros((4, 5, 40, 64, 3), np.uint8)
PAST = np.zeros((3, 40, 64, 3), np.uint8)


class Flaky:
    """Scores a candidate by the value of its first pixel; 255 is a NaN, 254 ends the engine."""

    name = "flaky"

    def __init__(self, error: BaseException | None = None, past: float = 7.0) -> None:
        self.asked = self.asked_past = 0
        self.error, self.past = error or MemoryError("no room for this video"), past

    def arrays(self, candidates: int, frames: int, past_frames: int) -> list[ArraySpec]:
        return [ArraySpec("value", (candidates,), "float32"), ArraySpec("past", (1,), "float32")]

    def measure(
        self, frames_GFHW3: NDArray[np.uint8], past_FHW3: NDArray[np.uint8]
    ) -> dict[str, NDArray[Any]]:
        self.asked += len(frames_GFHW3)
        first = frames_GFHW3[:, 0, 0, 0, 0].astype(np.float32)
        if (first == 254).any():
            raise self.error
        return {"value": np.where(first == 255, np.nan, first).astype(np.float32)}

    def measure_past(self, past_FHW3: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
        self.asked_past += 1
        return {"past": np.array([self.past], np.float32)}


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


@pytest.mark.parametrize(
    "error",
    [MemoryError("x"), RuntimeError("x"), ValueError("x"), KeyError("x"), OSError("x"), StopIteration("x")],
)
def test_no_error_of_an_engine_ends_the_stage(error: Exception) -> None:
    measured = measure_group(Flaky(error), videos(1, 254, 3, 4), PAST, {3: "the sample is not finite"})
    assert measured.reasons[3] == "the sample is not finite"
    assert all(measured.reasons[g].startswith(type(error).__name__) for g in range(3))
    assert all(np.isnan(value).all() for value in measured.arrays.values())


def test_ctrl_c_does_end_it() -> None:
    with pytest.raises(KeyboardInterrupt):
        measure_group(Flaky(KeyboardInterrupt()), videos(1, 254, 3, 4), PAST, {})


def test_an_engine_of_a_wrong_shape_is_missing_too() -> None:
    class Wrong(Flaky):
        def measure(
            self, frames_GFHW3: NDArray[np.uint8], past_FHW3: NDArray[np.uint8]
        ) -> dict[str, NDArray[Any]]:
            return {"value": np.zeros((len(frames_GFHW3), 7), np.float32)}

    measured = measure_group(Wrong(), videos(1, 2, 3, 4), PAST, {})
    assert set(measured.reasons) == {0, 1, 2, 3}
    assert np.isnan(measured.arrays["value"]).all()


def test_a_prefix_that_cannot_be_measured_makes_its_group_missing_until_it_can() -> None:
    bad = measure_group(Flaky(past=np.nan), videos(1, 2, 3, 4), PAST, {})
    assert set(bad.reasons) == {0, 1, 2, 3}
    assert "the clips before" in bad.reasons[0]
    assert all(np.isnan(value).all() for value in bad.arrays.values())
    again = measure_group(Flaky(), videos(1, 2, 3, 255), PAST, {}, bad)
    assert set(again.reasons) == {3}
    flaky = Flaky(past=np.nan)
    third = measure_group(flaky, videos(1, 2, 3, 4), PAST, {}, again)
    assert flaky.asked_past == 0  # what the others were judged against stays
    assert third.reasons == {}
    assert third.arrays["past"].tolist() == [7.0]


def test_an_engine_without_weights_has_an_identity(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(ENGINES, "flaky", EngineKind(lambda folder: Flaky()))
    first = engine_digest("flaky", tmp_path)
    assert isinstance(open_engine("flaky", tmp_path), Flaky)
    monkeypatch.setitem(ENGINES, "flaky", EngineKind(lambda folder: Flaky(), version=2))
    assert engine_digest("flaky", tmp_path) != first
    (tmp_path / "table.csv").write_text("1")
    monkeypatch.setitem(ENGINES, "flaky", EngineKind(lambda folder: Flaky(), ("table.csv",)))
    assert engine_digest("flaky", tmp_path) != first
