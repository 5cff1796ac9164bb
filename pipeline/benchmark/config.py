"""Parameters of the benchmarks; apart from their code so that reading params.yaml imports no torch."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class AccuracyConfig(BaseModel):
    """Size of the action benchmark (`params.yaml: evaluate`); the seed fixes rooms, start poses and noise."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    seed: int = Field(1000, ge=0, description="of rooms, start poses and sampling noise of the cases")
    basic: int = Field(48, ge=1, description="cases with a single key (8 keys in turn)")
    compound: int = Field(96, ge=1, description="cases with a compound (24 compounds in turn)")
    clips: int = Field(2, ge=1, description="length of a case in clips")
    split: Literal["evaluation", "rl"] = Field(
        "evaluation", description="rooms: evaluation; rl only to watch training itself"
    )
    weights: Literal["live", "old", "ema"] = Field("ema", description="which weights of a policy are judged")
