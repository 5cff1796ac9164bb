"""From raw rewards to training weights: normalise each reward alone, fuse, clip, map to r, pick best and
worst.

Why it is its own module of pure numpy: every failure seen in the field sits in these few lines. A group whose
candidates all earn 0.1 has a mean that differs from 0.1 by one rounding error; divided by a tiny floor that
error becomes an advantage of order one. A NaN score poisons the mean of its group. A missing score silently
becomes 0, which is a *grade*. So here:

* each reward is centred by the mean of its group and divided by a std with a real floor (1e-4), taken over
  the group or over the whole epoch (`global`, the released WorldCompass choice: the std is unbiased, ddof
  1, and holds the variance between prompts too);
* a group whose valid values agree up to fp32 rounding gets exactly 0 and counts as untrained;
* a missing score (NaN, infinite or marked invalid) is left out of mean and std and stays missing (NaN) in
  the output. A candidate that lacks one weighted reward but not another is missing altogether: it cannot be
  selected. It still counts in the mean and std of the rewards that it has, because each reward is
  normalised on its own;
* a weighted reward that is absent for a whole group (no valid value: a temporal reward before its warm-up
  ends, a relation with one member) leaves the fused sum, and the other weights are scaled up to sum to 1
  again.

Not here: which scores may be missing at all (the stage decides, MissingScoresError), and any randomness.
Sources: spec/worldcompass.md section 4, DESIGN 6.3.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, field_validator

from pipeline.errors import ConfigError

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]

# Scores come from fp32 engines whatever dtype they are stored in, so "equal" means up to a few fp32
# roundings.
_EQUAL_RTOL = 8 * float(np.finfo(np.float32).eps)


class AdvantageConfig(BaseModel):
    """Parameters of the advantage stage (params.yaml: `advantage`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    weights: dict[str, float] = Field(
        default={"action_fine": 2.0, "quality_drift": 1.0},
        description="weight of each reward by name; scaled to sum 1; 0 logs a reward without training it",
    )
    std: Literal["group", "global"] = Field(
        default="global", description="divide by the std of the group or of the whole epoch"
    )
    std_floor: float = Field(default=1e-4, gt=0, description="smallest std that an advantage is divided by")
    clip: float = Field(default=2.0, gt=0, description="Z: fused advantages are clipped to [-Z, Z] before r")
    best_of_n: int = Field(
        default=4, ge=2, description="samples trained per group: half best, half worst (even)"
    )

    @field_validator("weights")
    @classmethod
    def _weights_usable(cls, weights: dict[str, float]) -> dict[str, float]:
        if any(not np.isfinite(w) or w < 0 for w in weights.values()) or sum(weights.values()) <= 0:
            raise ValueError("advantage.weights must be finite, not negative, and at least one above 0")
        return weights

    @field_validator("best_of_n")
    @classmethod
    def _even(cls, n: int) -> int:
        if n % 2:
            raise ValueError(f"advantage.best_of_n is {n}: choose an even number (half best, half worst)")
        return n


@dataclass(frozen=True)
class Normalised:
    """One reward, normalised. NaN in `advantage_PG` means missing; `mean_P`, `std_P` are NaN where nothing
    is valid."""

    advantage_PG: FloatArray
    valid_PG: BoolArray
    trained_P: BoolArray  # >= 2 valid values that differ
    constant_P: BoolArray  # >= 2 valid values, all equal up to fp32 rounding
    absent_P: BoolArray  # no valid value at all
    mean_P: FloatArray
    std_P: FloatArray  # of the group, unbiased, before the floor


@dataclass(frozen=True)
class Fused:
    """The weighted sum of the rewards; NaN = missing."""

    advantage_PG: FloatArray
    valid_PG: BoolArray
    trained_P: BoolArray


@dataclass(frozen=True)
class Selection:
    """Candidates of one group to train on, best first and worst first; both have the same length, maybe 0."""

    best: IntArray
    worst: IntArray

    @property
    def indices(self) -> IntArray:
        """Interleaved (best, worst, best, ...), so that cutting a group between optimizer steps keeps the
        balance."""
        return np.stack([self.best, self.worst], axis=1).reshape(-1).astype(np.int64)


@dataclass(frozen=True)
class Advantages:
    """All that the advantage stage stores: per reward, fused, clipped, r in [0, 1] and the selection of
    each group."""

    rewards: dict[str, Normalised]
    fused_PG: FloatArray  # before the clip; NaN = missing
    advantage_PG: FloatArray  # clipped to [-Z, Z]; NaN = missing
    r_PG: FloatArray  # NaN = missing
    trained_P: BoolArray
    selections: list[Selection]  # empty for untrained groups
    metrics: dict[str, float]


def _mean_std(values: FloatArray) -> tuple[float, float]:
    """Mean and unbiased std in fp64; exactly constant input gives std 0 without rounding residue."""
    if values.size == 0:
        return float("nan"), float("nan")
    mean = float(values.mean())
    return mean, float(values.std(ddof=1)) if values.size > 1 else 0.0


def _is_constant(values: FloatArray) -> bool:
    return float(np.ptp(values)) <= _EQUAL_RTOL * float(np.abs(values).max())


def normalise(
    raw_PG: NDArray[Any],
    valid_PG: NDArray[Any] | None = None,
    *,
    std: Literal["group", "global"] = "global",
    floor: float = 1e-4,
) -> Normalised:
    """Centre one reward per group and divide by max(std, floor).

    `raw_PG` may be fp32 or fp64; NaN and infinities are missing, as is everything where `valid_PG` is False.
    Raises ConfigError for groups of one candidate: there is nothing to compare.
    """
    raw = np.asarray(raw_PG, dtype=np.float64)
    if raw.ndim != 2:
        raise ValueError(f"rewards must be (groups, candidates), got shape {raw.shape}")
    groups, size = raw.shape
    if size < 2:
        raise ConfigError(
            f"a group of {size} candidate(s) has no advantage: set rollout.candidates to 2 or more (usual: 8)"
        )
    valid = np.isfinite(raw)
    if valid_PG is not None:
        valid &= np.asarray(valid_PG, dtype=bool)

    advantage = np.full(raw.shape, np.nan)
    mean, group_std = np.full(groups, np.nan), np.full(groups, np.nan)
    constant, trained = np.zeros(groups, dtype=bool), np.zeros(groups, dtype=bool)
    epoch_std = _mean_std(raw[valid])[1]
    for p in range(groups):
        ok = valid[p]
        values = raw[p, ok]
        mean[p], group_std[p] = _mean_std(values)
        if values.size == 0:
            continue
        constant[p] = values.size >= 2 and _is_constant(values)
        trained[p] = values.size >= 2 and not constant[p]
        if not trained[p]:
            advantage[p, ok] = 0.0
            group_std[p] = 0.0
            continue
        scale = group_std[p] if std == "group" else epoch_std
        advantage[p, ok] = (values - mean[p]) / max(scale, floor)
    return Normalised(advantage, valid, trained, constant, np.asarray(~valid.any(axis=1)), mean, group_std)


def _positive_weights(names: Mapping[str, Normalised], weights: Mapping[str, float]) -> dict[str, float]:
    used = {name: float(w) for name, w in weights.items() if w != 0}
    unknown = sorted(set(used) - set(names))
    if unknown:
        raise ConfigError(
            f"advantage.weights names {unknown[0]!r}, which was not scored: score it or give it weight 0 "
            f"(scored: {', '.join(sorted(names)) or 'nothing'})"
        )
    if not used or any(w < 0 or not np.isfinite(w) for w in used.values()):
        raise ConfigError("advantage.weights must be finite, not negative, and at least one above 0")
    return used


def fuse(rewards: Mapping[str, Normalised], weights: Mapping[str, float]) -> Fused:
    """Weighted sum with weights that sum to 1 over the rewards present in a group (see the module's rules).

    Raises ConfigError for a weighted reward that was not scored, or weights that cannot be scaled to sum 1.
    """
    used = _positive_weights(rewards, weights)
    first = next(iter(rewards.values()))
    groups, size = first.advantage_PG.shape
    fused, trained = np.full((groups, size), np.nan), np.zeros(groups, dtype=bool)
    for p in range(groups):
        present = {name: w for name, w in used.items() if not rewards[name].absent_P[p]}
        if not present:
            continue
        total = sum(present.values())
        complete = np.logical_and.reduce([rewards[name].valid_PG[p] for name in present])
        terms = [w / total * rewards[name].advantage_PG[p] for name, w in present.items()]
        fused[p] = np.where(complete, np.sum(terms, axis=0), np.nan)
        trained[p] = complete.sum() >= 2 and any(rewards[name].trained_P[p] for name in present)
    return Fused(fused, np.isfinite(fused), trained)


def reward_to_r(advantage: NDArray[Any], clip: float) -> FloatArray:
    """r = 1/2 + clip(A / Z, -1, 1) / 2: the probability-like weight of the positive branch; NaN stays NaN."""
    return np.asarray(0.5 + 0.5 * np.clip(np.asarray(advantage, dtype=np.float64) / clip, -1.0, 1.0))


def check_best_of_n(n: int, candidates: int) -> None:
    """Raise ConfigError unless n is even, at least 2 and at most the group size."""
    if n < 2 or n % 2 or n > candidates:
        raise ConfigError(
            f"advantage.best_of_n is {n} with {candidates} candidates a group: "
            f"choose an even number from 2 to {candidates}"
        )


def select_best_worst(fused_G: NDArray[Any], n: int) -> Selection:
    """The n/2 best and n/2 worst candidates of a group by fused advantage; missing (NaN) ones are never
    taken.

    Ties go by index: of equal scores the lower index ranks as better. With fewer than n valid candidates
    both sides shrink alike, so best and worst stay balanced and never overlap. Raises ConfigError for an
    impossible n."""
    scores = np.asarray(fused_G, dtype=np.float64)
    check_best_of_n(n, scores.size)
    valid = np.flatnonzero(np.isfinite(scores))
    ranked = valid[np.argsort(-scores[valid], kind="stable")]
    half = min(n // 2, ranked.size // 2)
    return Selection(best=ranked[:half].astype(np.int64), worst=ranked[::-1][:half].astype(np.int64))


def compute_advantages(
    raw: Mapping[str, NDArray[Any]],
    config: AdvantageConfig,
    valid: Mapping[str, NDArray[Any]] | None = None,
) -> Advantages:
    """The whole chain for one epoch. `raw[name]` is (P, G), NaN = missing; `valid[name]` optionally masks
    more."""
    if not raw:
        raise ConfigError("no reward was scored: score at least one of advantage.weights")
    shapes = {name: np.asarray(values).shape for name, values in raw.items()}
    if len(set(shapes.values())) != 1:
        raise ValueError(f"rewards must have one shape (groups, candidates), got {shapes}")
    masks = valid or {}
    rewards = {
        name: normalise(values, masks.get(name), std=config.std, floor=config.std_floor)
        for name, values in raw.items()
    }
    check_best_of_n(config.best_of_n, next(iter(shapes.values()))[1])
    fused = fuse(rewards, config.weights)
    nothing = np.zeros(0, dtype=np.int64)
    selections = [
        select_best_worst(fused.advantage_PG[p], config.best_of_n)
        if fused.trained_P[p]
        else Selection(nothing, nothing)
        for p in range(len(fused.trained_P))
    ]
    return Advantages(
        rewards=rewards,
        fused_PG=fused.advantage_PG,
        advantage_PG=np.clip(fused.advantage_PG, -config.clip, config.clip),
        r_PG=reward_to_r(fused.advantage_PG, config.clip),
        trained_P=fused.trained_P,
        selections=selections,
        metrics=_metrics(raw, rewards, fused, selections, config),
    )


def _metrics(
    raw: Mapping[str, NDArray[Any]],
    rewards: Mapping[str, Normalised],
    fused: Fused,
    selections: list[Selection],
    config: AdvantageConfig,
) -> dict[str, float]:
    """What to look at, since the loss of an on-policy update says nothing about learning (spec 8.9)."""
    out: dict[str, float] = {}
    for name, reward in rewards.items():
        values = np.asarray(raw[name], dtype=np.float64)[reward.valid_PG]
        mean, std = _mean_std(values)
        judged = ~reward.absent_P
        group_std = reward.std_P[judged]
        out[f"{name}/mean"], out[f"{name}/std"] = mean, std
        out[f"{name}/group_std"] = float(group_std.mean()) if group_std.size else float("nan")
        out[f"{name}/zero_variance_share"] = float(reward.constant_P.mean())
        out[f"{name}/missing"] = float((~reward.valid_PG).sum())
    usable = fused.advantage_PG[fused.valid_PG]
    chosen = sum(s.indices.size for s in selections)
    out["clip_share"] = float((np.abs(usable) > config.clip).mean()) if usable.size else float("nan")
    out["missing_candidates"] = float((~fused.valid_PG).sum())
    out["trained_group_share"] = float(fused.trained_P.mean()) if fused.trained_P.size else float("nan")
    out["selected"] = float(chosen)
    return out
