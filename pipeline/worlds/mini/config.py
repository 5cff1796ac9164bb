"""Parameters of the mini world's pretraining; apart from its code so that reading params.yaml imports no torch."""

from pydantic import BaseModel, ConfigDict, Field, model_validator


class LabelNoise(BaseModel):
    """How often a clip does not execute what its labels say."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    compound_first_only: float = Field(
        1 / 3, ge=0, le=1, description="share of clips that execute a compound's first key alone"
    )
    compound_second_only: float = Field(
        1 / 3, ge=0, le=1, description="share of clips that execute a compound's second key alone"
    )
    single_ignored: float = Field(
        0.2, ge=0, le=1, description="share of clips that stand still on a single key"
    )

    @model_validator(mode="after")
    def _shares_of_one_whole(self) -> "LabelNoise":
        both = self.compound_first_only + self.compound_second_only
        if both > 1 + 1e-9:
            raise ValueError(
                f"compound_first_only + compound_second_only is {both:g}: a clip executes one of the two, "
                "so they must not exceed 1 together"
            )
        return self


class PretrainConfig(BaseModel):
    """Numbers of the mini world's base; those of the shipped one are in experiments/base.yaml and its pretrain.json."""

    model_config = ConfigDict(extra="forbid")
    seed: int = Field(0, ge=0)
    steps: int = Field(9250, gt=0)
    batch: int = Field(16, gt=0, description="clips a step")
    copies: int = Field(2, gt=0, description="noised copies of each clip, sharing its context")
    lr: float = Field(
        2.0e-3, gt=0, description="AdamW's rate for vectors, embeddings and projections in and out"
    )
    lr_matrix: float = Field(0.01, gt=0, description="Muon's rate for the matrices inside the blocks")
    warmup: int = Field(100, ge=0)
    horizon: int = Field(
        0, ge=0, description="steps of the cosine; 0: `steps`. Longer ones stop the cosine early"
    )
    anneal: int = Field(
        0, ge=0, description="last steps, over which the rate falls linearly to 0 on top of the cosine"
    )
    ema: float = Field(0.998, ge=0, lt=1)
    shift: float = Field(3.0, gt=0, description="timestep shift of the training sigmas, as the sampler's")
    clip_shares: list[float] = [0.3, 0.5, 0.15, 0.05]
    channels: int = Field(24, gt=0, le=192, description="latent channels: components of an 8 x 8 x 3 patch")
    dim: int = Field(128, gt=0)
    heads: int = Field(4, gt=0)
    layers: int = Field(6, gt=0)
    ffn: int = Field(384, gt=0)
    compound_weight: float = Field(
        0.4, ge=0, le=1, description="share of the runs of a word that are compounds"
    )
    hold: tuple[int, int] = (2, 6)
    noise: LabelNoise = LabelNoise()
    save_every: int = Field(250, gt=0)

    @model_validator(mode="after")
    def _fits_together(self) -> "PretrainConfig":
        if self.dim % self.heads:
            raise ValueError(f"dim is {self.dim}, not a multiple of heads = {self.heads}: change one of them")
        if not self.clip_shares or min(self.clip_shares) < 0 or sum(self.clip_shares) <= 0:
            raise ValueError(f"clip_shares is {self.clip_shares}: give shares of at least 0, one above 0")
        if not 1 <= self.hold[0] <= self.hold[1]:
            raise ValueError(
                f"hold is {list(self.hold)}: write the shortest run (at least 1), then the longest"
            )
        return self
