"""Samplers of words: what the policy practises.

WHY a file of its own: which actions are drawn, how often and for how long decides what a policy can learn,
and it is a table, not code. A sampler is a frozen set of numbers with one method, `sample(rng, actions) ->
labels`, so that stages, tests and the parameters file treat them alike. The caller brings the random
generator, keyed by prompt: the published generator sets no seed, and its trajectories cannot be made again.

This file starts with the training mix of WorldCompass (spec/worldcompass.md 1.4).
"""

from typing import Annotated, Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from pipeline.actions import LabelArray, label_of
from pipeline.errors import WordError


class WordSampler(Protocol):
    """Anything that draws words."""

    def sample(self, rng: np.random.Generator, actions: int) -> LabelArray:
        """Labels (A,) int64 of exactly `actions` actions; the same generator state gives the same word."""
        ...


def _labels(*words: str) -> tuple[int, ...]:
    return tuple(label_of(word) for word in words)


# The 32 templates by family; no idle action and no triple compound exists in the published mix.
FAMILIES: dict[str, tuple[int, ...]] = {
    "translation": _labels("w", "s", "d", "a"),
    "yaw": _labels("right", "left"),
    "pitch": _labels("up", "down"),
    "two_translations": _labels("w+d", "w+a", "s+d", "s+a"),
    "yaw_and_pitch": _labels("right+up", "right+down", "left+up", "left+down"),
    "translation_and_yaw": _labels(*(f"{move}+{turn}" for move in "wsda" for turn in ("right", "left"))),
    "translation_and_pitch": _labels(*(f"{move}+{turn}" for move in "wsda" for turn in ("up", "down"))),
}
BASIC_FAMILIES = ("translation", "yaw", "pitch")
TEMPLATES: tuple[int, ...] = tuple(label for labels in FAMILIES.values() for label in labels)

Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class TrainingMix(BaseModel):
    """Random runs of the 32 templates: draw one, hold it for a while, draw the next.

    A weight is that of *each template* of its family, so with the published numbers (the defaults) a family's
    share is weight * templates / 116: 24 % basic keys, 76 % compounds.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    translation: Weight = Field(4.0, description="weight of each of the 4 single translations")
    yaw: Weight = Field(4.0, description="weight of each of the 2 single yaws")
    pitch: Weight = Field(2.0, description="weight of each of the 2 single pitches")
    two_translations: Weight = Field(6.0, description="weight of each of the 4 diagonals")
    yaw_and_pitch: Weight = Field(2.0, description="weight of each of the 4 compounds of yaw and pitch")
    translation_and_yaw: Weight = Field(6.0, description="weight of each of the 8 moves with a yaw")
    translation_and_pitch: Weight = Field(1.0, description="weight of each of the 8 moves with a pitch")
    hold: tuple[int, int] = Field((2, 16), description="shortest and longest run of one template, in actions")

    @model_validator(mode="after")
    def _check(self) -> "TrainingMix":
        if not sum(self.shares().values()) > 0:
            raise ValueError("all family weights are 0: give at least one family a positive weight")
        shortest, longest = self.hold
        if not 1 <= shortest <= longest:
            raise ValueError(
                f"hold = {shortest}, {longest}: write the shortest run (at least 1), then the longest"
            )
        return self

    def shares(self) -> dict[str, float]:
        """Probability of each family at a draw (all 0 only if all weights are)."""
        mass = {name: getattr(self, name) * len(labels) for name, labels in FAMILIES.items()}
        total = sum(mass.values())
        return {name: value / total if total else 0.0 for name, value in mass.items()}

    def sample(self, rng: np.random.Generator, actions: int) -> LabelArray:
        """Labels (A,) int64; the last run is cut where the word ends. WordError for fewer than one action."""
        if actions < 1:
            raise WordError(f"a word of {actions} actions: ask for at least 1 (latents - 1)")
        weights = np.array([getattr(self, name) for name, labels in FAMILIES.items() for _ in labels])
        cumulative = np.cumsum(weights) / np.cumsum(weights)[-1]
        shortest, longest = self.hold
        word: list[int] = []
        while len(word) < actions:
            # By hand instead of rng.choice: its stream may change between numpy releases, a word must not.
            template = TEMPLATES[int(np.searchsorted(cumulative, rng.random(), side="right"))]
            word += [template] * (shortest + int(rng.random() * (longest - shortest + 1)))
        return np.array(word[:actions], dtype=np.int64)
