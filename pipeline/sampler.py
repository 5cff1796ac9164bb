"""Parameters of the sampler, and presets that say how each published checkpoint wants to be sampled.

A checkpoint is only good at the noise levels that it was trained for: a distilled student takes 4 steps, its teacher
50 with guidance, and WorldCompass rolls out with 40 and none (spec worldplay 2). The numbers are those of diffusers'
`FlowMatchEulerDiscreteScheduler` given explicit sigmas (its default spacing differs by up to 0.6; tests compare).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

PresetName = Literal[
    "mini", "worldplay-5b-distilled", "worldplay-8b-ar", "worldplay-8b-distilled", "worldcompass-rl"
]
FEW_STEPS = 8  # no undistilled flow model is sampled in so few


@dataclass(frozen=True)
class Preset:
    """Euler steps, shift of their noise levels, scale of guidance (1: none), whether timesteps are whole numbers."""

    steps: int
    shift: float
    cfg: float = 1.0
    truncate_timestep: bool = False


PRESETS: dict[str, Preset] = {
    "mini": Preset(5, 3.0),
    "worldplay-5b-distilled": Preset(4, 8.0),
    "worldplay-8b-ar": Preset(50, 5.0, cfg=6.0),  # the 8B's ar and ar_rl checkpoints
    "worldplay-8b-distilled": Preset(4, 5.0),
    "worldcompass-rl": Preset(40, 5.0, truncate_timestep=True),  # rollouts of the 8B's ar checkpoint
}


class SamplerConfig(BaseModel):
    """The ODE sampler of prefixes and candidates; the update draws its noise levels from the same ones."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    preset: PresetName | None = Field(
        None, description="numbers of a published checkpoint; keys that are written beside it win"
    )
    steps: int = Field(5, ge=1, description="Euler steps of the flow-matching ODE")
    shift: float = Field(3.0, gt=0, description="timestep shift: above 1 spends more steps at high noise")
    latents: Literal["float16", "float32", "bfloat16"] = Field(
        "float16", description="type that latents are stored in"
    )
    cfg: float = Field(
        1.0, ge=1, description="scale of classifier-free guidance, at twice the forwards; 1: none"
    )
    truncate_timestep: bool = Field(
        False, description="tell the model int(1000 sigma), as WorldCompass does, and not 1000 sigma"
    )

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        return fill(data) if isinstance(data, dict) else data

    @model_serializer(mode="wrap")
    def _serialise(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Newer keys are left out where they do nothing: artifacts made before there were any stay valid."""
        idle = {"preset": None, "cfg": 1.0, "truncate_timestep": False}
        return {key: value for key, value in handler(self).items() if key not in idle or value != idle[key]}

    def written(self) -> dict[str, Any]:
        """What a file with these values would hold: of a preset's numbers only those that differ from it.

        So an epoch that overrides `preset` gets all numbers of its own.
        """
        numbers = asdict(PRESETS[self.preset]) if self.preset else {}
        return {
            key: value
            for key, value in self.model_dump(mode="json").items()
            if key not in numbers or value != numbers[key]
        }


def fill(data: Mapping[str, Any]) -> dict[str, Any]:
    """A sampler section with the numbers of its preset put where none is written; unknown presets change nothing."""
    preset = data.get("preset")
    numbers = asdict(PRESETS[preset]) if isinstance(preset, str) and preset in PRESETS else {}
    return {**numbers, **data}


def sampler_warnings(sampler: SamplerConfig, checkpoint: str | None) -> list[str]:
    """What makes these samples a poor base for NFT, one line each; `checkpoint` is what was imported, None for mini."""
    lines = []
    if checkpoint is not None and ("distilled" in checkpoint or sampler.steps <= FEW_STEPS):
        what = "few-step distilled checkpoint" if "distilled" in checkpoint else "checkpoint"
        lines.append(
            f"WARNING: the {what} {checkpoint!r} is sampled in {sampler.steps} steps. NFT takes a velocity for that of "
            "a flow and moves it at each noise level on its own; a distilled student's is neither, and few levels are "
            "trained. Expect slower or unstable learning; WorldCompass trains the undistilled 8B (sampler.preset: "
            "worldcompass-rl)"
        )
    if sampler.cfg != 1:
        lines.append(
            f"WARNING: sampler.cfg is {sampler.cfg:g}: candidates come from a guided policy, while NFT's old velocity "
            "is not guided and each rollout costs twice; WorldCompass rolls out without guidance (sampler.cfg: 1)"
        )
    return lines
