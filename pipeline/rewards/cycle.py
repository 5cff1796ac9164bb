"""The rewards of words that close: spatial, temporal and relation closure, each gated by the achieved excursion.

Three rewards of one form, gate * mean exp(-alpha d) over their pairs (spec/worldcycle.md 1.5): `spatial` compares the
way back with the way out, `temporal` later cycles with the first, `relation` the last frame with the end of another
word. A reward without pairs in the target clip does not apply: it is absent there, neither 0 nor 1, and its weight goes
to the others. `cycle` is the published sum of the first two as one reward, for those who want one normalisation.

WHY gated: a video that never moves closes perfectly (1.7). The gate opens with the share of the commanded excursion
that the pose scorer saw and is fully open well before all of it: inside a group that share varies three times as much
as closeness does, and a reward multiplied by it orders candidates by their excursion alone (docs/results.md). How far
a video goes is the action reward's business. alpha has no default: it is calibrated on the base model and frozen
(`wcpipe calibrate`).
"""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from pipeline.camera import relative_poses
from pipeline.errors import ConfigError
from pipeline.rewards.action import accumulate, excursion
from pipeline.rewards.base import ABSENT, RawScores, Reward, RewardContext, RewardValues, per_candidate
from pipeline.rewards.closure import (
    Discrepancy,
    DiscrepancyConfig,
    closeness,
    cycle_reward,
    excursion_gate,
    pair_discrepancies,
)

TRACKS, POSE = "tracks", "pose"
NO_ALPHA = "rewards.closure.alpha is not set: run `wcpipe calibrate --write params.yaml`, which measures it on the base"


class ClosureConfig(DiscrepancyConfig):
    """Parameters of the closure rewards (params.yaml: `rewards.closure`)."""

    scorer: str = Field("lucas-kanade", description="lucas-kanade: the embedded tracker; or cotracker")
    alpha: float | None = Field(
        None, gt=0, description="how fast the reward falls with d; calibrated on the base (wcpipe calibrate)"
    )
    gated: bool = Field(
        True, description="multiply by a gate that opens with the share of the commanded excursion achieved"
    )
    full_excursion: float = Field(
        0.4,
        gt=0,
        le=1,
        description="share of the commanded excursion from which the gate is fully open; 1: proportional to the end",
    )
    temporal_warmup: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of the run's optimizer updates before the temporal reward joins in",
    )
    scale: Literal["world", "scene"] = Field(
        "world", description="estimated poses are in world units, or scaled by the fit of their scene"
    )
    spatial_weight: float = Field(
        1.0, ge=0, description="of the spatial part in the reward `cycle` (lambda_s)"
    )
    temporal_weight: float = Field(
        0.5, ge=0, description="of the temporal part in the reward `cycle` (lambda_t)"
    )


VERSION = 2  # of all four; 2: a shared past without texture is absent, and the gate is open before the full excursion
DETAILS = ("d", "closeness", "worst", "coverage", "failed", "gate")


def commanded_excursion(c2w_T44: NDArray[np.float64]) -> tuple[float, float]:
    """Largest distance and turn (degrees) from the first of these poses."""
    return excursion(relative_poses(c2w_T44))


def gate_of(rel_N44: NDArray[np.float64], context: RewardContext, full: float) -> float | None:
    """The gate by the excursion that estimated motions between scored frames achieved; None where unknown.

    1 where no excursion is commanded at all (a clip of no-ops): then there is nothing that standing still could cheat.
    """
    if context.c2w_T44 is None or not np.isfinite(rel_N44).all():
        return None
    asked = commanded_excursion(context.c2w_T44)
    if max(asked) <= 1e-6:
        return 1.0
    return excursion_gate(excursion(accumulate(rel_N44, context.stride)), asked, full)


def group_discrepancies(
    raw: RawScores, g: int, rows: NDArray[np.int64], context: RewardContext, config: DiscrepancyConfig
) -> list[Discrepancy]:
    """d of some pairs of one candidate; `rows` are their places in `context.pairs`."""
    names = ("shift", "back", "colour", "confidence", "texture")
    tracks = {name: raw.values[name][g][rows] for name in names}
    return pair_discrepancies(tracks, raw.values["first_texture"][g], context.size_HW, config)


def _absent(candidates: int, why: str, details: Mapping[str, Any]) -> RewardValues:
    nan = np.full(candidates, np.nan)
    return RewardValues(nan, (ABSENT + why,) * candidates, dict.fromkeys(details, nan))


def _both(raw: Mapping[str, RawScores], gated: bool) -> RawScores:
    """The tracks with the pose scorer's reasons where the gate needs its poses."""
    tracks, poses = raw[TRACKS], raw[POSE].reasons
    reasons = tuple(t or (p if gated else None) for t, p in zip(tracks.reasons, poses, strict=True))
    return RawScores(tracks.values, reasons)


def _gate(
    raw: Mapping[str, RawScores], g: int, context: RewardContext, config: ClosureConfig
) -> float | None:
    if not config.gated:
        return 1.0
    rel = np.array(raw[POSE].values["relative"][g], dtype=np.float64)
    rel[:, :3, 3] *= context.scale if config.scale == "scene" else 1.0
    return gate_of(rel, context, config.full_excursion)


def _measured(found: list[Discrepancy], alpha: float, gate: float | None) -> dict[str, Any]:
    values = [pair.d for pair in found]
    return {
        "d": float(np.mean(values)),
        "closeness": closeness(values, alpha),
        "worst": float(np.exp(-alpha * max(values))),
        "coverage": float(np.mean([pair.coverage for pair in found])),
        "failed": float(np.mean([pair.failed for pair in found])),
        "gate": np.nan if gate is None else gate,
    }


def _untextured(
    raw: RawScores, rows: NDArray[np.int64], context: RewardContext, config: ClosureConfig
) -> bool:
    """Whether nothing can be compared, through no fault of a candidate: the earlier frames are of the shared past and
    none of them has texture, so it is the same for all of the group.
    """
    assert context.pairs is not None
    measured = [g for g, reason in enumerate(raw.reasons) if reason is None]
    if not measured or (context.pairs.index_Q2[rows, 0] >= context.shared_frames).any():
        return False
    textured_QN = raw.values["texture"][measured[0]][rows] >= config.texture
    return bool((textured_QN.sum(axis=1) < config.min_points).all())


def _reward(kind: Literal["spatial", "temporal", "relation"]) -> Reward:
    def compute(raw: Mapping[str, RawScores], context: RewardContext, config: ClosureConfig) -> RewardValues:
        candidates = len(raw[TRACKS].reasons)
        nothing = dict.fromkeys(DETAILS, np.nan)
        rows = np.zeros(0, np.int64) if context.pairs is None else context.pairs.of(kind)
        if not len(rows):
            return _absent(candidates, f"no {kind} pair of frames ends in the target clip", nothing)
        if kind == "temporal" and context.progress < config.temporal_warmup:
            return _absent(candidates, f"warm-up lasts until {config.temporal_warmup:g} of the run", nothing)
        if config.alpha is None:
            raise ConfigError(NO_ALPHA)
        alpha = config.alpha
        if _untextured(raw[TRACKS], rows, context, config):
            why = "no textured point in the frames of the shared past that the clip is compared with"
            return _absent(candidates, why, nothing)

        def measure(g: int) -> tuple[float, dict[str, Any]]:
            found = group_discrepancies(raw[TRACKS], g, rows, context, config)
            gate = _gate(raw, g, context, config)
            details = _measured(found, alpha, gate)
            if gate is None:
                return np.nan, details | {"reason": "the achieved excursion is not known"}
            return gate * details["closeness"], details

        return per_candidate(_both(raw, config.gated), measure, nothing)

    return Reward(kind, (TRACKS, POSE), compute, section="closure", config=ClosureConfig, version=VERSION)


def _cycle(raw: Mapping[str, RawScores], context: RewardContext, config: ClosureConfig) -> RewardValues:
    """gate * (lambda_s spatial + lambda_t temporal) of the parts that apply; absent where neither does."""
    parts = [reward.compute(raw, context, config) for reward in (SPATIAL, TEMPORAL)]
    details = ("spatial", "temporal")
    reasons = [part.reasons for part in parts]
    if all(reason is not None and reason.startswith(ABSENT) for column in reasons for reason in column):
        return _absent(len(reasons[0]), "no pair of frames ends in the target clip", dict.fromkeys(details))

    def measure(g: int) -> tuple[float, dict[str, Any]]:
        failed = next((r[g] for r in reasons if r[g] and not str(r[g]).startswith(ABSENT)), None)
        values = [float(part.value_G[g]) if np.isfinite(part.value_G[g]) else None for part in parts]
        shown = {
            name: np.nan if value is None else value for name, value in zip(details, values, strict=True)
        }
        # the parts are gated already
        total = cycle_reward(
            values[0],
            values[1],
            None if failed else 1.0,
            spatial_weight=config.spatial_weight,
            temporal_weight=config.temporal_weight,
        )
        if total is None:
            return np.nan, shown | {"reason": failed or "no part of the reward has a weight"}
        return total, shown

    return per_candidate(_both(raw, config.gated), measure, dict.fromkeys(details, np.nan))


SPATIAL, TEMPORAL, RELATION = _reward("spatial"), _reward("temporal"), _reward("relation")
CYCLE = Reward("cycle", (TRACKS, POSE), _cycle, section="closure", config=ClosureConfig, version=VERSION)
CLOSURE_REWARDS = (SPATIAL, TEMPORAL, RELATION, CYCLE)
