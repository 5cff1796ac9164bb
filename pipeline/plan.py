"""What one epoch samples: which clip is trained, which clips each candidate draws for itself, and which words.

WHY a file: with the training mix the target clip moves on by one each epoch (DESIGN 6.6). With cycles it must lie where
something comes back, which depends on the level that the epoch has drawn; and with whole videos (`rollout.mode: cycle`)
candidates share the first frame only. Prefix, rollout, score and advantage would each have to know that; they read it
here or from what the prefix stage wrote into the records.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pipeline.camera import clip_frames
from pipeline.cycles import MultiScale

if TYPE_CHECKING:
    from pipeline.config import Params


@dataclass(frozen=True)
class Plan:
    """Clips count from 1. `clip` is trained; candidates sample the clips `first`..`clip` (clip mode: only that one).

    `level` of the cycles (0 is one long cycle), None without cycles; `cycle_clips` the clips of one cycle.
    """

    words: Literal["none", "retracing", "relation"]
    clip: int
    first: int
    level: int | None = None
    cycle_clips: int | None = None

    def about(self) -> dict[str, Any]:
        """What a group's record keeps beside `target_clip`; nothing for the training mix."""
        if self.words == "none":
            return {}
        return {"words": self.words, "first_clip": self.first, "level": self.level}


def returning_clips(clips: int, cycle_clips: int) -> list[int]:
    """Clips (from 1) in which something comes back: the second half of the first cycle and all that follows."""
    return list(range(cycle_clips // 2 + 1, clips + 1))


def plan_of(params: Params, epoch: int) -> Plan:
    """The plan of epoch `epoch` (from 1): a pure function of its parameters, their seed and the epoch."""
    from pipeline.rollout import target_clip

    cycle, whole = params.cycle, params.rollout.mode == "cycle"
    if cycle.words == "none":
        clip = target_clip(epoch, params.target.n_min, params.target.n_max)
        return Plan("none", clip, clip)
    if cycle.words == "relation":
        clip = cycle.relation_clips
        return Plan("relation", clip, 1 if whole else clip)
    rng = np.random.default_rng([params.seed, epoch, 0xC1C1E])
    scale = MultiScale(smallest=cycle.smallest, levels=cycle.levels)
    level = scale.draw(rng)
    length = scale.table()[level][0]
    choices = returning_clips(cycle.clips, length)
    clip = cycle.clips if whole else choices[int(rng.random() * len(choices))]
    return Plan("retracing", clip, 1 if whole else clip, level, length)


def first_clip(record: dict[str, Any]) -> int:
    """The first clip (from 1) that the candidates of a stored group sampled for themselves."""
    return int(record.get("first_clip", record["target_clip"]))


def candidate_frames(record: dict[str, Any]) -> slice:
    """Frames of the video that the candidates of a stored group drew, by its prefix's record."""
    stride, latents = int(record["stride"]), int(record["clip_latents"])
    start = clip_frames(first_clip(record) - 1, stride, latents).start
    return slice(start, clip_frames(int(record["target_clip"]) - 1, stride, latents).stop)


def plan_inputs(params: Params) -> dict[str, Any]:
    """What of the parameters the plan adds to the inputs of an artifact: nothing with the training mix, so that
    artifacts made before cycles existed stay valid.
    """
    if params.cycle.words == "none":
        return {}
    return {"cycle": params.cycle.model_dump(mode="json"), "mode": params.rollout.mode}
