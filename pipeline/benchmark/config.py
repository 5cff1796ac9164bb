"""Parameters of the benchmarks; apart from their code so that reading params.yaml imports no torch."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class AccuracyConfig(BaseModel):
    """Size of the action benchmark (`params.yaml: evaluate`); the seed fixes rooms, start poses and noise."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    seed: int = Field(4000, ge=0, description="of rooms, start poses and sampling noise of the cases")
    basic: int = Field(48, ge=1, description="cases with a single key (8 keys in turn)")
    compound: int = Field(96, ge=1, description="cases with a compound (24 compounds in turn)")
    clips: int = Field(2, ge=1, description="length of a case in clips")
    split: Literal["evaluation", "rl"] = Field(
        "evaluation", description="rooms: evaluation; rl only to watch training itself"
    )
    weights: Literal["live", "old", "ema"] = Field("ema", description="which weights of a policy are judged")


class CycleBenchConfig(BaseModel):
    """Size of CycleBench (`params.yaml: cyclebench`); words, rooms and noise are the same for every policy."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    words: Literal["mini", "published"] = Field(
        "mini", description="mini: half the published lengths, which fit into the mini world's rooms"
    )
    settings: list[Literal["short", "mid", "long", "composite"]] = Field(
        ["short", "mid", "composite"], min_length=1, description="which lengths are judged"
    )
    rooms: int = Field(2, ge=1, description="rooms for each word")
    seed: int = Field(4000, ge=0, description="of rooms, start poses and sampling noise")
    split: Literal["evaluation", "rl"] = Field(
        "evaluation", description="rooms: evaluation; rl only to watch training itself"
    )
    weights: Literal["live", "old", "ema"] = Field("ema", description="which weights of a policy are judged")
    matcher: Literal["patches", "roma"] = Field(
        "patches", description="who measures d: of another family than the tracker that rewards"
    )
    oracle: bool = Field(True, description="judge with the mini world's oracle as well, the slowest part")
