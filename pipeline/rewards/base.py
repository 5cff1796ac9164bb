"""What a reward is: a named, pure function of what the scorers measured and of what was commanded.

Raw measurements are stored by the score stage and rewards are computed from them, so a changed threshold or weight
costs no second scoring. A value that cannot be computed is NaN *with a reason*, never 0.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from pipeline.camera import StepSize
from pipeline.pairs import FramePairs

FloatArray = NDArray[np.float64]
# Begins the reason of a value that is not there because there is nothing to measure (a temporal reward of a single
# cycle): that is no failure of a scorer, and does not count as a missing score.
ABSENT = "does not apply: "


class NoConfig(BaseModel):
    """For rewards without parameters: any key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True)
class RewardContext:
    """What a group was asked to do. F counts the scored frames: the one before the clip, then the clip's new frames.

    `labels_F` commanded label of each scored frame, 0 for the first; `stride` frames a latent; `step` the motion of one
    action; `scale` world units per unit of the pose estimator, fitted once a scene from its first frame on (1: the
    estimator measures in world units; NaN: it could not be fitted). `c2w_T44` commanded poses of the scored latents.

    Of words that close: `pairs` of frames that must look alike, `shared_frames` how many frames of the video all
    candidates have in common, `size_HW` of the frames, `progress` the share of the run's optimizer updates that were
    made before this epoch (0 where nobody asked).
    """

    labels_F: NDArray[np.int64]
    stride: int
    step: StepSize
    scale: float = 1.0
    c2w_T44: FloatArray | None = None
    pairs: FramePairs | None = None
    shared_frames: int = 1
    size_HW: tuple[int, int] = (0, 0)
    progress: float = 0.0


@dataclass(frozen=True)
class RawScores:
    """What one scorer measured for a group: arrays whose first axis is the candidate, NaN where it failed.

    `reasons` says why, for each candidate (None: fine).
    """

    values: Mapping[str, NDArray[Any]]
    reasons: tuple[str | None, ...]


@dataclass(frozen=True)
class RewardValues:
    """One number a candidate, NaN = missing; `reasons` says why; `details` are stored beside it, first axis G."""

    value_G: FloatArray
    reasons: tuple[str | None, ...]
    details: dict[str, NDArray[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        silent = [g for g, r in enumerate(self.reasons) if (r is None) != bool(np.isfinite(self.value_G[g]))]
        if len(self.reasons) != len(self.value_G) or silent:
            raise ValueError(
                f"every missing value needs a reason and no other may have one (candidates {silent})"
            )


Compute = Callable[[Mapping[str, RawScores], RewardContext, Any], RewardValues]


@dataclass(frozen=True)
class Reward:
    """A reward by name: which scorers it needs, its section and class of parameters, and how it is computed.

    `compute(raw, context, config)` gets the raw scores of at least the scorers in `needs`. Raise `version` when a
    change of its code changes its values: code is in no digest, and finished epochs would keep the former values.
    """

    name: str
    needs: tuple[str, ...]
    compute: Compute
    section: str
    config: type[BaseModel] = NoConfig
    version: int = 1


def per_candidate(
    raw: RawScores, measure: Callable[[int], tuple[float, dict[str, Any]]], details: Mapping[str, Any]
) -> RewardValues:
    """Call `measure(g)` -> (value, details) for every candidate that was scored; the others are missing.

    A value that is not finite becomes missing as well. `details` names the details with what a missing one holds.
    """
    values, reasons = np.full(len(raw.reasons), np.nan), list(raw.reasons)
    kept: dict[str, list[Any]] = {name: [] for name in details}
    for g, reason in enumerate(raw.reasons):
        found: dict[str, Any] = dict(details)
        if reason is None:
            values[g], measured = measure(g)
            found |= measured
            if not np.isfinite(values[g]):
                values[g], reasons[g] = np.nan, str(measured.get("reason", "the measurement is not finite"))
        for name in details:
            kept[name].append(found[name])
    return RewardValues(values, tuple(reasons), {name: np.asarray(column) for name, column in kept.items()})
