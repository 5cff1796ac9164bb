"""What a cheat earns: the closure rewards of honest and of dishonest videos, by the published formulas and by ours.

Every row goes through the very reward functions that train. Cheats are made twice: from true renders, which no policy
can draw, and from the base's own videos, which it can; a reward is only safe if an honest base earns more than cheats
of the same make (spec/worldcycle.md 1.7). The words are retracing cycles, twice, so that both closure rewards are
defined; palindrome copies are perfect on them, and only relations, whose last frame was never seen, tell them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipeline.benchmark.cycle_controls import blurred, palindrome, static, swapped
from pipeline.benchmark.cyclebench import measure
from pipeline.camera import StepSize, frame_labels
from pipeline.cycles import retrace
from pipeline.plan import Plan
from pipeline.rewards.action import ACTION_FINE, ACTION_SOFT, ActionConfig
from pipeline.rewards.base import RawScores, RewardContext
from pipeline.rewards.closure import published_d
from pipeline.rewards.cycle import RELATION, SPATIAL, TEMPORAL, ClosureConfig
from pipeline.rewards.quality import QUALITY_DRIFT

if TYPE_CHECKING:
    from pipeline.config import Params
    from pipeline.scorers.registry import Engine
    from pipeline.scorers.tracks import TracksEngine
    from pipeline.worlds.base import WorldModel
    from pipeline.worlds.closed_prompts import ClosedPrompt
    from pipeline.worlds.registry import Prompt

Frames = NDArray[np.uint8]
LAMBDAS = {"spatial": 1.0, "temporal": 0.5, "action": 2.0, "quality": 1.0}
FIRST_CASE = 300_000
COLUMNS = (
    "published_spatial",
    "published_temporal",
    "spatial",
    "temporal",
    "gate",
    "action",
    "action_soft",
    "quality",
)
TOTALS = ("published", "gated", "gated_all", "published_plain", "gated_plain")


@dataclass(frozen=True)
class Bench:
    """Who measures, and the frozen parameters of the rewards."""

    tracks: TracksEngine
    pose: Engine
    critic: Engine
    closure: ClosureConfig
    action: ActionConfig


def context_of(closed: ClosedPrompt, size_HW: tuple[int, int]) -> RewardContext:
    """What a whole video of this prompt was asked to do."""
    labels_T = np.concatenate([np.zeros(1, np.int64), closed.prompt.labels_A])
    return RewardContext(
        labels_F=frame_labels(labels_T, 1),
        stride=1,
        step=closed.prompt.step,
        c2w_T44=closed.prompt.c2w_T44,
        pairs=closed.pairs,
        size_HW=size_HW,
    )


def measured(
    bench: Bench, closed: ClosedPrompt, videos_GFHW3: Frames, reference_HW3: Frames | None = None
) -> dict[str, RawScores]:
    """Raw scores of G whole videos, as the score stage stores them."""
    size = videos_GFHW3.shape[2:4]
    tracks = bench.tracks.for_pairs(closed.pairs, len(closed.pairs), (size[0], size[1]), reference_HW3)
    fine = (None,) * len(videos_GFHW3)
    engines: dict[str, Any] = {"tracks": tracks, "pose": bench.pose, "critic": bench.critic}
    return {name: RawScores(measure(engine, videos_GFHW3), fine) for name, engine in engines.items()}


def reward_rows(
    bench: Bench, closed: ClosedPrompt, videos: Mapping[str, Frames]
) -> dict[str, dict[str, float]]:
    """All rewards and totals of the videos of one prompt, by the name of the video.

    `published`: survivors-only d, no gate, raw sum with the published weights. `gated`: ours as trained, closure gated.
    `gated_all`: the action reward gated as well, against videos that are slow but right.
    """
    frames = np.stack(list(videos.values()))
    raw = measured(bench, closed, frames)
    context = context_of(closed, frames.shape[2:4])
    # what a finished run would pay: no warm-up
    ungated = bench.closure.model_copy(update={"gated": False, "temporal_warmup": 0.0})
    spatial, temporal = (r.compute(raw, context, ungated) for r in (SPATIAL, TEMPORAL))
    gate = SPATIAL.compute(raw, context, bench.closure.model_copy(update={"gated": True})).details["gate"]
    fine, soft = (r.compute(raw, context, bench.action).value_G for r in (ACTION_FINE, ACTION_SOFT))
    drift = QUALITY_DRIFT.compute(raw, context, QUALITY_DRIFT.config()).value_G
    rows = {}
    for g, name in enumerate(videos):
        tracks = {key: values[g] for key, values in raw["tracks"].values.items()}
        row = {
            "published_spatial": _published(tracks, closed, "spatial", context, bench.closure),
            "published_temporal": _published(tracks, closed, "temporal", context, bench.closure),
            "spatial": float(spatial.value_G[g]),
            "temporal": float(temporal.value_G[g]),
            "gate": float(gate[g]),
            "action": float(fine[g]),
            "action_soft": float(soft[g]),
            "quality": float(drift[g]),
        }
        rows[name] = row | totals(row)
    return rows


def totals(row: Mapping[str, float]) -> dict[str, float]:
    """The totals of one row, raw sums with the published weights; `plain` ones without the quality term, whose critic
    has no bounds and would outweigh the others (in training each reward is standardised first).
    """
    s, t, a, v = LAMBDAS.values()
    act, look = a * row["action"], v * row["quality"]
    closure = s * row["spatial"] + t * row["temporal"]
    published = s * row["published_spatial"] + t * row["published_temporal"] + act
    return {
        "published": published + look,
        "gated": row["gate"] * closure + act + look,
        "gated_all": row["gate"] * (closure + act) + look,
        "published_plain": published,
        "gated_plain": row["gate"] * closure + act,
    }


def _published(
    tracks: Mapping[str, Any], closed: ClosedPrompt, kind: str, context: RewardContext, config: ClosureConfig
) -> float:
    """mean exp(-alpha d) with the published d. Its pair of the turn with itself, always 1, is counted as there; pairs
    without any survivor are left out, as the formula is not defined there; 1 if none is left.
    """
    assert config.alpha is not None
    d = np.array([published_d(tracks, int(q), context.size_HW) for q in closed.pairs.of(kind)])
    values = np.exp(-config.alpha * d[np.isfinite(d)])
    if kind == "spatial":
        values = np.append(values, 1.0)
    return float(values.mean()) if len(values) else 1.0


def hack_videos(
    sample: Callable[[Prompt, str], Frames], closed: ClosedPrompt, other: ClosedPrompt
) -> dict[str, Frames]:
    """The videos of one prompt: true render and base, and the cheats made of each. `other` is in another room.

    `sample(prompt, key)` is the base's video of a prompt.
    """
    made: dict[str, Frames] = {}
    for name, draw in (("render", lambda prompt, key: render_prompt(prompt)), ("base", sample)):
        honest, elsewhere = draw(closed.prompt, "own"), draw(other.prompt, "own")
        made[name] = honest
        made[f"{name}, slow"] = draw(at_half_step(closed.prompt), "slow")
        made[f"{name}, blurred"] = blurred(honest)
        made[f"{name}, scene swap"] = swapped(honest, elsewhere)
        made[f"{name}, palindrome"] = copied_back(honest, closed)
    made["static"] = static(made["render"])
    return made


def copied_back(video_FHW3: Frames, closed: ClosedPrompt) -> Frames:
    """The video with every frame of a way back replaced by the frame of the way out that it must equal."""
    out = video_FHW3.copy()
    for i, j in closed.pairs.index_Q2[closed.pairs.of("spatial")]:
        out[j] = out[i]
    return out


def render_prompt(prompt: Prompt) -> Frames:
    """The true video of a prompt of the mini world."""
    from pipeline.worlds.mini.renderer import MiniScene, render

    scene = MiniScene.make(int(prompt.about["scene_seed"]))
    return render(scene, np.asarray(prompt.about["start"]) @ prompt.c2w_T44)


def at_half_step(prompt: Prompt) -> Prompt:
    """The same way with every step half as long. Its poses are the way out, integrated, and the way back, mirrored."""
    half = StepSize(prompt.step.translation / 2, prompt.step.rotation_deg / 2)
    # two cycles of whole clips: out for a quarter of the latents, the second turn one action early
    quarter = (len(prompt.labels_A) + 1) // 4
    word = retrace(prompt.labels_A[:quarter], half, repeats=2, actions=len(prompt.labels_A))
    return replace(prompt, c2w_T44=word.c2w_T44)


def sampler_of(world: WorldModel, params: Params) -> Callable[[Prompt, str], Frames]:
    """The base's whole video of a prompt, drawn once a (prompt, key). `own` and `slow` start from the same noise."""
    from pipeline.rollout import Sampling, sample_prefix
    from pipeline.worlds.base import ClipCondition
    from pipeline.worlds.registry import scene_of

    sampling = Sampling(params.sampler.steps, params.sampler.shift, params.seed, 0)
    made: dict[tuple[int, str], Frames] = {}  # the video of one prompt is the other room of the one before

    def sample(prompt: Prompt, key: str) -> Frames:
        if (prompt.index, key) not in made:
            made[prompt.index, key] = draw(prompt, f"hacks/{prompt.index}{'/other' * (key == 'other')}")
        return made[prompt.index, key]

    def draw(prompt: Prompt, noise: str) -> Frames:
        labels_T = np.concatenate([np.zeros(1, np.int64), prompt.labels_A])
        condition = ClipCondition.of(labels_T, prompt.c2w_T44, prompt.K_33)
        clips = len(labels_T) // world.spec.clip_latents
        latents = sample_prefix(
            world,
            scene_of(world, prompt),
            condition,
            prompt.c2w_T44,
            clips + 1,
            sampling,
            noise,
        )
        return world.decode(latents)[0]

    return sample


def hack_cases(params: Params, world: WorldModel, count: int) -> list[ClosedPrompt]:
    """Retracing cycles of two clips, twice, in evaluation rooms; words of the training mix."""
    from pipeline.worlds.closed_prompts import make_closed_prompts

    cycle = params.cycle.model_copy(update={"words": "retracing", "smallest": 1, "levels": 2})
    plan = Plan("retracing", 4, 1, level=1, cycle_clips=2)
    indices = range(FIRST_CASE, FIRST_CASE + count)
    return make_closed_prompts(
        params.world.name, "evaluation", indices, params.seed, plan, cycle, params.words, world.spec
    )


def relation_rows(bench: Bench, params: Params, world: WorldModel, count: int) -> list[dict[str, float]]:
    """The gated relation reward of render, palindrome copy, base and static video, one row a prompt with two words.

    True videos are compared with the true end of the other word, the base with its own. Ends that show a wall without
    any texture have nothing to compare with and are passed over.
    """
    from pipeline.worlds.closed_prompts import make_closed_prompts

    cycle = params.cycle.model_copy(update={"words": "relation", "relation_clips": 2})
    plan = Plan("relation", 2, 1)
    sample, index = sampler_of(world, params), FIRST_CASE
    rows: list[dict[str, float]] = []
    while len(rows) < count:
        made = make_closed_prompts(
            params.world.name, "evaluation", [index], params.seed, plan, cycle, params.words, world.spec
        )[0]
        index += 1
        if made.other is None:
            continue  # a loop ends at its first frame, which a palindrome copy reaches too
        truth, base = render_prompt(made.prompt), sample(made.prompt, "own")
        row = {}
        for names, videos, reference in (
            (
                ("render", "render, palindrome", "static"),
                (truth, palindrome(truth), static(truth)),
                render_prompt(made.other)[-1],
            ),
            (("base", "base, palindrome"), (base, palindrome(base)), sample(made.other, "other")[-1]),
        ):
            raw = measured(bench, made, np.stack(videos), reference)
            values = RELATION.compute(raw, context_of(made, truth.shape[1:3]), bench.closure)
            for g, name in enumerate(names):
                row[name] = float(values.value_G[g])
                row[f"{name} (ungated)"] = float(values.details["closeness"][g])
        if all(np.isfinite(value) for value in row.values()):
            rows.append(row)
    return rows


def summary(rows: Sequence[Mapping[str, Mapping[str, float]]]) -> list[dict[str, Any]]:
    """One line a video: means over prompts of every column and total, and the paired difference of totals to `base`."""
    from pipeline.benchmark.statistics import paired

    lines = []
    for name in rows[0]:
        line: dict[str, Any] = {"video": name}
        for column in (*COLUMNS, *TOTALS):
            line[column] = float(np.mean([row[name][column] for row in rows]))
        for total in TOTALS:
            own, base = (np.array([row[n][total] for row in rows]) for n in (name, "base"))
            line[f"{total} - base"] = paired(own, base)
        lines.append(line)
    return lines
