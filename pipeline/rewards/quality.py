"""Visual quality as separate rewards: how good the clip's frames look, for a fixed prompt (`quality`) or the scene's
caption (`quality_caption`, real scorers only), and how far they drifted from the first frame (`quality_drift`).

The released WorldCompass calls the second one "VQ" while the paper means the first (spec/worldcompass.md 3.5, 7.1), so
they have names of their own here. Drift is symmetric, as there: becoming *better* than the first frame is punished
too. Scores of a critic have no bounds; advantages.py normalises them.
"""

from collections.abc import Mapping

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from pipeline.rewards.base import RawScores, Reward, RewardContext, RewardValues, per_candidate

# Raw values: "quality" (G, F) of the scored frames or "new_quality" (G, K) of the judged ones among those that the clip
# added; "first" (G,) of the video's first frame; "caption" (G, K) where frames are judged for the scene's caption too.
SCORER = "critic"


class QualityConfig(BaseModel):
    """Parameters of the quality rewards (params.yaml: `rewards.quality`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    scorer: str = Field("critic", description="critic: the embedded network; or hpsv3")


def _quality(raw: Mapping[str, RawScores], context: RewardContext, config: QualityConfig) -> RewardValues:
    scores = raw[SCORER]
    return per_candidate(scores, lambda g: (float(_new_frames(scores, g).mean()), {}), {})


def _caption(raw: Mapping[str, RawScores], context: RewardContext, config: QualityConfig) -> RewardValues:
    scores = raw[SCORER]
    return per_candidate(
        scores, lambda g: (float(np.mean(scores.values["caption"][g], dtype=np.float64)), {}), {}
    )


def _drift(raw: Mapping[str, RawScores], context: RewardContext, config: QualityConfig) -> RewardValues:
    scores = raw[SCORER]

    def measure(g: int) -> tuple[float, dict[str, float]]:
        first = float(np.asarray(scores.values["first"], dtype=np.float64)[g])
        return -float(np.abs(_new_frames(scores, g) - first).mean()), {}

    return per_candidate(scores, measure, {})


def _new_frames(scores: RawScores, g: int) -> np.ndarray:
    """Scores of the frames that the clip added; the first scored frame was there before it."""
    if "new_quality" in scores.values:
        return np.asarray(scores.values["new_quality"][g], dtype=np.float64)
    return np.asarray(scores.values["quality"][g], dtype=np.float64)[1:]


QUALITY = Reward("quality", (SCORER,), _quality, section="quality", config=QualityConfig)
QUALITY_CAPTION = Reward("quality_caption", (SCORER,), _caption, section="quality", config=QualityConfig)
QUALITY_DRIFT = Reward("quality_drift", (SCORER,), _drift, section="quality", config=QualityConfig)
