"""Visual quality as two separate rewards: how good the clip's frames look, and how far they drifted from the first.

The released WorldCompass calls the second one "VQ" while the paper means the first (spec/worldcompass.md 3.5, 7.1), so
they have two names here. Drift is symmetric, as there: becoming *better* than the first frame is punished too. Scores
of a critic have no bounds; advantages.py normalises them.
"""

from collections.abc import Mapping

import numpy as np

from pipeline.rewards.base import NoConfig, RawScores, Reward, RewardContext, RewardValues, per_candidate

# Raw values: "quality" (G, F) of the scored frames, "first" (G,) of the video's first frame.
SCORER = "critic"


def _quality(raw: Mapping[str, RawScores], context: RewardContext, config: NoConfig) -> RewardValues:
    scores = raw[SCORER]
    return per_candidate(scores, lambda g: (float(_new_frames(scores, g).mean()), {}), {})


def _drift(raw: Mapping[str, RawScores], context: RewardContext, config: NoConfig) -> RewardValues:
    scores = raw[SCORER]

    def measure(g: int) -> tuple[float, dict[str, float]]:
        first = float(np.asarray(scores.values["first"], dtype=np.float64)[g])
        return -float(np.abs(_new_frames(scores, g) - first).mean()), {}

    return per_candidate(scores, measure, {})


def _new_frames(scores: RawScores, g: int) -> np.ndarray:
    """Scores of the frames that the clip added; the first scored frame was there before it."""
    return np.asarray(scores.values["quality"][g], dtype=np.float64)[1:]


QUALITY = Reward("quality", (SCORER,), _quality, section="quality")
QUALITY_DRIFT = Reward("quality_drift", (SCORER,), _drift, section="quality")
