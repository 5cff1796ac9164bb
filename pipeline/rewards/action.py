"""Did the camera do what the keys said? Estimated motions become labels and are compared with the commanded ones.

Two rewards from one comparison (spec/worldcompass.md 3.3, 3.4): `action_joint`, the share of steps whose translation
*and* rotation code are right, and `action_fine`, the mean of the two shares, which trains better because half a success
counts. Of several translation thresholds tau the one with the highest joint accuracy is taken, per candidate; the fine
accuracy is read at that tau. tau and the excursion are stored, since a static video can be "right" on no-ops only.

Both ask yes or no, and a noisy estimate near a threshold answers at random. `action_soft` asks how far the motion is
from the commanded one, in steps: the same measurement, without the coin.

Two ways to cut a clip, two presets: `per_latent` (the paper: one comparison for each action, its frames accumulated)
and `per_frame` (the released code). Published thresholds are absolute, for steps of 0.1 units and 2 degrees a latent.
`relative_to_step` states the same numbers as fractions of the commanded step, so that they hold for any world.

Not here: alignment. `RewardContext.labels_F` comes from the one helper in camera.py, which benchmark and reward share.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from pipeline.actions import CODES
from pipeline.camera import WORLDCOMPASS_STEP, StepSize, labels_from_relative, step_transform
from pipeline.errors import DataError
from pipeline.rewards.base import RawScores, Reward, RewardContext, RewardValues, per_candidate

FloatArray = NDArray[np.float64]
LabelArray = NDArray[np.int64]
SCORER = "pose"  # its raw value "relative": estimated c2w motions between scored frames, (G, F-1, 4, 4)

# (translation thresholds, rotation threshold in degrees) as published, and the frames a latent of those worlds.
PRESETS = {
    "per_latent": ((0.01, 0.02, 0.03, 0.04, 0.05), 1.0),
    "per_frame": ((0.002, 0.005, 0.01), 0.2),
}
_PUBLISHED_STRIDE = 4


class ActionConfig(BaseModel):
    """Parameters of the action rewards (params.yaml: `rewards.action`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    scorer: str = Field("pose", description="pose: the embedded network; or depth-anything-3")
    preset: Literal["per_latent", "per_frame"] = Field(
        default="per_latent", description="compare once per action (paper) or once per frame (released code)"
    )
    relative_to_step: bool = Field(
        default=True,
        description="thresholds are fractions of the commanded step; false: world units and degrees",
    )
    taus: list[float] | None = Field(
        default=None,
        min_length=1,
        description="translation thresholds, the best is taken; empty: the preset's",
    )
    rotation: float | None = Field(default=None, gt=0, description="rotation threshold; empty: the preset's")
    scale: Literal["auto", "world", "scene"] = Field(
        default="auto",
        description="estimated poses are in world units, or scaled by the fit of their scene; auto: as the scorer does",
    )

    @property
    def fitted(self) -> bool:
        """Whether poses are scaled by the fit of their scene: the embedded scorer measures in world units itself."""
        return self.scale == "scene" or (self.scale == "auto" and self.scorer != SCORER)

    @model_validator(mode="after")
    def _positive(self) -> "ActionConfig":
        if self.taus is not None and min(self.taus) <= 0:
            raise ValueError(f"rewards.action.taus is {self.taus}: every threshold must be above 0")
        return self

    def thresholds(self, step: StepSize, stride: int) -> tuple[list[float], float]:
        """(translation thresholds in world units, rotation threshold in degrees) for this world's step and stride."""
        published_taus, published_rotation = PRESETS[self.preset]
        whole = self.preset == "per_latent"
        published, frames = WORLDCOMPASS_STEP, 1 if whole else _PUBLISHED_STRIDE
        taus = list(published_taus) if self.taus is None else list(self.taus)
        rotation = published_rotation if self.rotation is None else self.rotation
        if not self.relative_to_step:
            return taus, rotation
        if self.taus is None:
            taus = [tau * frames / published.translation for tau in taus]
        if self.rotation is None:
            rotation = rotation * frames / published.rotation_deg
        parts = 1 if whole else stride
        return [tau * step.translation / parts for tau in taus], rotation * step.rotation_deg / parts


@dataclass(frozen=True)
class ActionScore:
    """Accuracies of one candidate at its best tau; `hits_S2` (translation right, rotation right) for each step."""

    joint: float
    fine: float
    tau: float
    hits_S2: NDArray[np.bool_]


def accumulate(rel_N44: FloatArray, stride: int) -> FloatArray:
    """Motion of each latent, (N / stride, 4, 4), from the motions between its frames. DataError if N does not fit."""
    count, rest = divmod(len(rel_N44), stride)
    if rest or not count:
        raise DataError(f"{len(rel_N44)} motions between frames are not whole latents of {stride}")
    out = rel_N44[0::stride]
    for i in range(1, stride):
        out = out @ rel_N44[i::stride]
    return np.asarray(out)


def step_labels(labels_F: LabelArray, stride: int) -> LabelArray:
    """The label of each action from the labels of the scored frames. DataError if one changes inside a latent."""
    labels = np.asarray(labels_F[1:]).reshape(-1, stride) if (len(labels_F) - 1) % stride == 0 else None
    if labels is None or (labels != labels[:, :1]).any():
        raise DataError(
            f"labels of {len(labels_F)} frames do not change at latents of {stride}: one frame late?"
        )
    return labels[:, 0]


def score_action(
    rel_N44: FloatArray, labels_F: LabelArray, config: ActionConfig, step: StepSize, stride: int
) -> ActionScore:
    """Compare estimated motions between F scored frames, (F-1, 4, 4) in world units, with the F commanded labels.

    Raises DataError if their numbers do not fit or a motion is not finite.
    """
    if len(rel_N44) != len(labels_F) - 1:
        raise DataError(
            f"{len(rel_N44)} estimated motions for {len(labels_F)} labelled frames: one fewer is needed"
        )
    if config.preset == "per_latent":
        motions, commanded = accumulate(rel_N44, stride), step_labels(labels_F, stride)
    else:
        motions, commanded = np.asarray(rel_N44), np.asarray(labels_F[1:])
    taus, rotation = config.thresholds(step, stride)
    best: ActionScore | None = None
    for tau in taus:
        seen = labels_from_relative(motions, tau, rotation)
        hits = np.stack([seen // CODES == commanded // CODES, seen % CODES == commanded % CODES], axis=1)
        joint = float(hits.all(axis=1).mean())
        if best is None or joint > best.joint:
            best = ActionScore(joint, float(hits.mean()), tau, hits)
    assert best is not None  # taus has at least one entry
    return best


def closeness(rel_N44: FloatArray, labels_F: LabelArray, step: StepSize, stride: int) -> float:
    """How near estimated motions, (F-1, 4, 4) in world units, are to the commanded ones: mean over latents and over
    translation and rotation of 1 - error / step, an error of a whole step or more counting 0.

    Standing still on a single key reads 1/2: the other half, not turning or not moving, was obeyed. Raises DataError as
    `score_action`.
    """
    if len(rel_N44) != len(labels_F) - 1:
        raise DataError(
            f"{len(rel_N44)} estimated motions for {len(labels_F)} labelled frames: one fewer is needed"
        )
    motions = accumulate(rel_N44, stride)
    commanded = np.stack([step_transform(int(label), step) for label in step_labels(labels_F, stride)])
    # along the axes of the new camera, so that a turn which is missing does not count as a wrong direction too
    moved, asked = (np.einsum("nji,nj->ni", rel[:, :3, :3], rel[:, :3, 3]) for rel in (motions, commanded))
    apart = np.linalg.norm(moved - asked, axis=-1) / step.translation
    cosine = (np.einsum("nij,nij->n", motions[:, :3, :3], commanded[:, :3, :3]) - 1) / 2
    turned = np.degrees(np.arccos(np.clip(cosine, -1, 1))) / step.rotation_deg
    return float(1 - (np.minimum(apart, 1) + np.minimum(turned, 1)).mean() / 2)


def excursion(rel_N44: FloatArray) -> tuple[float, float]:
    """Largest distance (units of the motions) and largest turn (degrees) from the first frame, over all frames."""
    pose, distance, turn = np.eye(4), 0.0, 0.0
    for rel in rel_N44:
        pose = pose @ rel
        cosine = np.clip((np.trace(pose[:3, :3]) - 1) / 2, -1, 1)
        distance = max(distance, float(np.linalg.norm(pose[:3, 3])))
        turn = max(turn, float(np.degrees(np.arccos(cosine))))
    return distance, turn


def fit_scale(estimated_N44: FloatArray, commanded_N44: FloatArray) -> float:
    """World units per estimator unit: least squares of relative translations, from a scene's first frame on.

    One scalar for a scene, never one for a clip: a clip that hardly moves would be scaled up to look obedient. NaN if
    the estimate does not move, or moves against the command: then there is nothing to fit.
    """
    estimated, commanded = estimated_N44[:, :3, 3].ravel(), commanded_N44[:, :3, 3].ravel()
    own = float(estimated @ estimated)
    scale = float(estimated @ commanded) / own if own > 0 else 0.0
    return scale if np.isfinite(scale) and scale > 0 else float("nan")


def _reward(kind: Literal["joint", "fine", "soft"]) -> Reward:
    def compute(raw: Mapping[str, RawScores], context: RewardContext, config: ActionConfig) -> RewardValues:
        scores = raw[SCORER]
        scale = context.scale if config.fitted else 1.0

        def measure(g: int) -> tuple[float, dict[str, object]]:
            rel = np.array(scores.values["relative"][g], dtype=np.float64)
            if not np.isfinite(scale):
                return float("nan"), {"reason": "the pose scale of the scene could not be fitted"}
            if not np.isfinite(rel).all():
                return float("nan"), {"reason": "an estimated pose is not finite"}
            rel[:, :3, 3] *= scale
            score = score_action(rel, context.labels_F, config, context.step, context.stride)
            distance, turn = excursion(rel)
            soft = closeness(rel, context.labels_F, context.step, context.stride)
            return {"joint": score.joint, "fine": score.fine, "soft": soft}[kind], {
                "joint": score.joint,
                "fine": score.fine,
                "tau": score.tau,
                "excursion": distance,
                "excursion_deg": turn,
            }

        nan = float("nan")
        missing = {"joint": nan, "fine": nan, "tau": nan, "excursion": nan, "excursion_deg": nan}
        return per_candidate(scores, measure, missing)

    return Reward(f"action_{kind}", (SCORER,), compute, section="action", config=ActionConfig)


ACTION_JOINT = _reward("joint")
ACTION_FINE = _reward("fine")
ACTION_SOFT = _reward("soft")
