"""Parameters of words that close (params.yaml: `cycle`); apart from their code so that reading the file is quick."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MOST_CLIPS = 16  # the longest video that both papers train on (spec/worldcycle.md 1.5)


class CycleConfig(BaseModel):
    """Which words an epoch practises instead of the training mix, and how long they are.

    A video has H = smallest * 2^levels clips. One level k is drawn for each epoch: 2^k cycles of H / 2^k clips, so that
    the turn is never at a known place (H = 16, levels = 4: cycles of 16, 8, 4 or 2 clips, 1, 2, 4 or 8 times).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    words: Literal["none", "retracing", "relation"] = Field(
        "none",
        description="none: the training mix; retracing: out and back on the same poses; "
        "relation: two words that end at one pose",
    )
    smallest: int = Field(1, ge=1, description="half the clips of the shortest cycle")
    levels: int = Field(2, ge=1, le=10, description="how many lengths of cycles there are")
    max_clips: int = Field(
        MOST_CLIPS, ge=1, le=MOST_CLIPS, description="longest video: smallest * 2^levels may not exceed it"
    )
    relation_clips: int = Field(2, ge=1, le=MOST_CLIPS, description="clips of each word of a relation")

    @property
    def clips(self) -> int:
        """H, the clips of a video with cycles."""
        return self.smallest * 2**self.levels

    @model_validator(mode="after")
    def _fits(self) -> "CycleConfig":
        if self.words == "retracing" and self.clips > self.max_clips:
            raise ValueError(
                f"cycle.smallest * 2^cycle.levels is {self.clips} clips, above cycle.max_clips = {self.max_clips}: "
                "lower cycle.levels or cycle.smallest"
            )
        if self.words == "relation" and self.relation_clips > self.max_clips:
            raise ValueError(
                f"cycle.relation_clips is {self.relation_clips}, above cycle.max_clips = {self.max_clips}"
            )
        return self
