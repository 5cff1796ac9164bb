"""Quality and drift read the clip's new frames only, and a failed frame is missing, never a number."""

import numpy as np
import pytest

from pipeline.camera import StepSize
from pipeline.rewards import RawScores, RewardContext, find
from pipeline.rewards.base import NoConfig

CONTEXT = RewardContext(np.zeros(4, np.int64), 1, StepSize(0.4, 6.0))


def scores(quality, first, reasons=None):
    values = {"quality": np.asarray(quality, dtype=np.float32), "first": np.asarray(first)}
    return {"critic": RawScores(values, reasons or (None,) * len(quality))}


def test_quality_is_the_mean_of_the_new_frames():
    out = find("quality").compute(scores([[99, 1, 2, 3], [-99, 4, 4, 4]], [0, 0]), CONTEXT, NoConfig())
    np.testing.assert_allclose(out.value_G, [2, 4])
    assert out.reasons == (None, None)


def test_drift_is_symmetric_and_zero_without_change():
    raw = scores([[0, 5, 5, 5], [0, 4, 6, 5], [0, 3, 3, 3]], [5, 5, 5])
    out = find("quality_drift").compute(raw, CONTEXT, NoConfig())
    np.testing.assert_allclose(out.value_G, [0, -2 / 3, -2])


@pytest.mark.parametrize("name", ["quality", "quality_drift"])
def test_a_failed_frame_or_candidate_is_missing_with_a_reason(name):
    raw = scores([[0, 1, np.nan, 1], [0, 1, 1, 1], [0, 1, 1, 1]], [1, 1, 1], (None, None, "crashed"))
    out = find(name).compute(raw, CONTEXT, NoConfig())
    assert np.isnan(out.value_G[[0, 2]]).all()
    assert np.isfinite(out.value_G[1])
    assert out.reasons == ("the measurement is not finite", None, "crashed")
