"""CycleBench: does a world look the same when the camera comes back? Closure metrics with what keeps them honest.

The published metrics (spec/worldcycle.md 2.2) are d between frames that must agree: ESC at the ends of cycles, RPS
along the way back, RCS between repeats. A video that never moves has 0 in all three, so each row also says how much of
the excursion was made, how much of the first views was found again, and, in the mini world, where the camera really is.
d is measured by a matcher of another family than the tracker that rewards; lost points and failed pairs cost d_fail.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipeline.benchmark.cycle_words import CycleWord, cyclebench_words
from pipeline.camera import frame_labels, relative_poses
from pipeline.cycles import ClosedWord
from pipeline.errors import DataError, NumericsError, WordError
from pipeline.rewards.action import ActionConfig, accumulate, excursion, score_action
from pipeline.rewards.closure import Discrepancy, DiscrepancyConfig, closure_ratio, pair_discrepancies
from pipeline.scorers.tracks import PairTracks, texture_of, track_pairs

if TYPE_CHECKING:
    from pipeline.benchmark.config import CycleBenchConfig
    from pipeline.scorers.registry import Engine
    from pipeline.scorers.tracker import Tracker
    from pipeline.worlds.base import WorldModel
    from pipeline.worlds.registry import Prompt
    from pipeline.worlds.scene_store import Scenes

Frames = NDArray[np.uint8]
OnCase = Callable[[int, int], Any]
RATIO_FRAMES = 12  # frames on the way whose distance from the first one closure_ratio looks at
METRICS = (
    "esc", "rps", "rcs", "accuracy", "quality", "closure_ratio", "excursion", "coverage", "failed",
    "esc_reward", "oracle_drift", "oracle_turn", "oracle_excursion", "oracle_accuracy", "oracle_failed",
)  # fmt: skip


@dataclass(frozen=True)
class CycleCase:
    """One word in one room: `closed` is the word with its poses, `prompt` where it starts."""

    word: CycleWord
    closed: ClosedWord
    prompt: Prompt


def make_cycle_cases(config: CycleBenchConfig, source: str | Scenes) -> list[CycleCase]:
    """The cases, the same for every policy; pure in `config`. `source` as `registry.prompt_source` gives it.

    Raises WordError where a word fits into no room.
    """
    from pipeline.worlds.closed_prompts import closed_case

    cases = []
    chosen = [word for word in cyclebench_words(config.words) if word.setting in config.settings]
    for number, word in enumerate(chosen):
        for room in range(config.rooms):
            index = 200_000 + 1_000 * number + room
            built, prompt = closed_case(source, config.split, index, config.seed, word.build)
            if prompt is None:
                raise WordError(
                    f'"{word.name}" ({word.task}, {word.setting}) fits into no room; take cyclebench.words: mini, or '
                    "shorter settings"
                )
            cases.append(CycleCase(word, built, prompt))
    return cases


def generate_cycle(
    world: WorldModel, case: CycleCase, seed: int, steps: int, shift: float, cfg: float = 1.0
) -> Frames:
    """Sample the whole video of a case, uint8 [F, H, W, 3]; noise keyed by seed and case.

    Raises NumericsError when the sample is not finite.
    """
    import torch

    from pipeline.rollout import Sampling, sample_prefix
    from pipeline.worlds.base import ClipCondition
    from pipeline.worlds.registry import scene_of

    prompt, clips = case.prompt, case.word.latents // world.spec.clip_latents
    condition = ClipCondition.of(case.closed.labels_T, prompt.c2w_T44, prompt.K_33)
    sampling = Sampling(steps, shift, seed, 0, cfg)
    key = f"cyclebench/{prompt.index}"
    scene = scene_of(world, prompt, cfg != 1)
    latents = sample_prefix(world, scene, condition, prompt.c2w_T44, clips + 1, sampling, key)
    if not torch.isfinite(latents).all():
        raise NumericsError(
            f'cyclebench: the policy\'s sample of "{case.word.name}" is not finite; the policy has diverged: lower '
            "update.lr, or judge an earlier epoch"
        )
    return world.decode(latents)[0]


@dataclass(frozen=True)
class Judges:
    """Who judges: pose and quality engines, the evaluation's matcher, the tracker that rewards, and thresholds of d."""

    pose: Engine
    critic: Engine
    matcher: Tracker
    tracker: Tracker
    config: DiscrepancyConfig = field(default_factory=DiscrepancyConfig)

    @staticmethod
    def embedded(pose: Engine, critic: Engine) -> Judges:
        from pipeline.scorers.tracker import LucasKanade, PatchMatcher

        return Judges(pose, critic, PatchMatcher(), LucasKanade())


def measure(engine: Engine, videos_GFHW3: Frames) -> dict[str, NDArray[Any]]:
    """What an engine measures of whole videos that begin with one frame."""
    from pipeline.scorers.registry import Partial

    found = engine.measure(videos_GFHW3, videos_GFHW3[0, :1])
    return found.arrays if isinstance(found, Partial) else found


def distances(
    tracker: Tracker,
    earlier_FHW3: Frames,
    later_FHW3: Frames,
    pairs_Q2: NDArray[np.int64],
    config: DiscrepancyConfig,
) -> list[Discrepancy]:
    """d of pairs of frames: the earlier ones of one video, the later ones of another (usually the same)."""
    if not len(pairs_Q2):
        return []
    tracks: PairTracks = track_pairs(tracker, earlier_FHW3[pairs_Q2[:, 0]], later_FHW3[pairs_Q2[:, 1]])
    if not np.isfinite(tracks.confidence_Q2N).all():
        raise DataError(
            f"{tracker.name} could not measure a pair of frames; see its worker's log and run again"
        )
    arrays: Mapping[str, Any] = {
        name: getattr(tracks, f"{name}_Q2N") for name in ("shift", "back", "colour", "confidence")
    } | {"texture": tracks.texture_QN}
    return pair_discrepancies(arrays, texture_of(earlier_FHW3[0]), earlier_FHW3.shape[1:3], config)


def _mean(found: Sequence[Discrepancy]) -> float | None:
    return float(np.mean([pair.d for pair in found])) if found else None


def judge_cycle(
    case: CycleCase, video_FHW3: Frames, judges: Judges, stride: int, later_FHW3: Frames | None = None
) -> dict[str, Any]:
    """One row: what the estimators say of a case's video. None where a metric is not defined for its word.

    With `later_FHW3` frames are compared with those of that other video (the control `random`).
    """
    closed, step = case.closed, case.prompt.step
    later = video_FHW3 if later_FHW3 is None else later_FHW3
    kinds = {
        "esc": closed.end_pairs(stride),
        "rps": closed.mirror_pairs(stride),
        "rcs": closed.repeat_pairs(stride),
    }
    end = stride * closed.cycles[-1].end
    way = np.unique(np.linspace(0, end, RATIO_FRAMES + 1).round().astype(np.int64))[1:]
    listed = np.concatenate([*kinds.values(), np.stack([np.zeros_like(way), way], axis=1)])
    pairs, place = np.unique(listed, axis=0, return_inverse=True)
    every = distances(judges.matcher, video_FHW3, later, pairs, judges.config)
    found = [every[i] for i in place.ravel()]
    bounds = np.cumsum([0, *(len(rows) for rows in kinds.values())])
    parts = {name: found[bounds[i] : bounds[i + 1]] for i, name in enumerate(kinds)}
    compared = [pair for part in parts.values() for pair in part]
    rewarded = distances(judges.tracker, video_FHW3, later, kinds["esc"], judges.config)

    labels_F = frame_labels(closed.labels_T, stride)
    rel = np.asarray(measure(judges.pose, video_FHW3[None])["relative"][0], np.float64)
    score = score_action(rel, labels_F, ActionConfig(), step, stride)
    quality = measure(judges.critic, video_FHW3[None])["quality"][0, 1:]
    last = _mean(found[-1:])
    assert last is not None
    return {
        "task": case.word.task,
        "setting": case.word.setting,
        "word": case.word.name,
        "scene": case.prompt.scene_key,
        **{name: _mean(part) for name, part in parts.items()},
        "accuracy": score.joint,
        "quality": float(np.mean(quality)),
        "closure_ratio": closure_ratio(last, [pair.d for pair in found[bounds[-1] :]]),
        "excursion": _share(
            excursion(accumulate(rel, stride)), excursion(relative_poses(case.prompt.c2w_T44))
        ),
        "coverage": float(np.mean([pair.coverage for pair in compared])),
        "failed": float(np.mean([pair.failed for pair in compared])),
        "esc_reward": _mean(rewarded),
    }


def _share(achieved: Sequence[float], asked: Sequence[float]) -> float:
    """The lesser share of the commanded distance and turn that was made; above 1 where the camera went too far."""
    return min(got / wanted for got, wanted in zip(achieved, asked, strict=True) if wanted > 1e-6)


def judge_by_oracle(cases: Sequence[CycleCase], videos: Sequence[Frames]) -> list[dict[str, Any]]:
    """Where the camera of the mini world really was, one row a case; all videos have one length.

    `oracle_drift` (world units) and `oracle_turn` (degrees) are the distance of the end of the cycles from the start.
    """
    from pipeline.worlds.mini import oracle
    from pipeline.worlds.mini.renderer import MiniScene

    scenes = [MiniScene.make(int(case.prompt.about["scene_seed"])) for case in cases]
    labels_BF = np.stack([case.closed.labels_T for case in cases])
    starts = np.stack([np.asarray(case.prompt.about["start"]) for case in cases])
    commanded = np.stack([start @ case.prompt.c2w_T44 for start, case in zip(starts, cases, strict=True)])
    track = oracle.track(scenes, np.stack(videos), starts, labels_BF, commanded_BF44=commanded)
    hits = oracle.accuracy(track.labels_BF(), labels_BF)["joint"]
    rows = []
    for b, case in enumerate(cases):
        rel = np.linalg.inv(track.c2w_BF44[b, :-1]) @ track.c2w_BF44[b, 1:]
        end = np.linalg.inv(track.c2w_BF44[b, 0]) @ track.c2w_BF44[b, case.closed.cycles[-1].end]
        cosine = float(np.clip((np.trace(end[:3, :3]) - 1) / 2, -1, 1))
        rows.append(
            {
                "oracle_drift": float(np.linalg.norm(end[:3, 3])),
                "oracle_turn": math.degrees(math.acos(cosine)),
                "oracle_excursion": _share(excursion(rel), excursion(relative_poses(case.prompt.c2w_T44))),
                "oracle_accuracy": float(hits[b].mean()),
                "oracle_failed": float(track.failed_BF[b, 1:].mean()),
            }
        )
    return rows


def evaluate_cycles(
    cases: Sequence[CycleCase],
    video_of: Callable[[CycleCase], Frames],
    judges: Judges,
    stride: int,
    oracle: bool,
    later_of: Callable[[CycleCase], Frames] | None = None,
    on_case: OnCase = lambda done, total: None,
) -> list[dict[str, Any]]:
    """Rows of all cases, in their order. Videos of one length go to the oracle 16 at a time and are then dropped."""
    rows: list[dict[str, Any]] = [{} for _ in cases]
    waiting: dict[int, list[tuple[int, Frames]]] = {}

    def flush(length: int) -> None:
        batch = waiting.pop(length, [])
        if batch and oracle:
            found = judge_by_oracle([cases[i] for i, _ in batch], [video for _, video in batch])
            for (i, _), row in zip(batch, found, strict=True):
                rows[i] |= row

    for i, case in enumerate(cases):
        video = video_of(case)
        rows[i] = judge_cycle(case, video, judges, stride, later_of(case) if later_of else None)
        waiting.setdefault(len(video), []).append((i, video))
        if len(waiting[len(video)]) == 16:
            flush(len(video))
        on_case(i + 1, len(cases))
    for length in list(waiting):
        flush(length)
    return rows


def table(rows: Sequence[Mapping[str, Any]], by: Sequence[str] = ("task", "setting")) -> list[dict[str, Any]]:
    """Means per task and setting, then per setting and over all.

    Weighting: every evaluated video counts once, in the metrics that are defined for its word (RPS on retracing words,
    RCS on repeats); so a mean over tasks weighs each task by its number of such videos. `videos` is that number.
    """
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        key = tuple(str(row[name]) for name in by)
        for shown in dict.fromkeys((key, ("all", *key[1:]), ("all",) * len(key))):
            groups.setdefault(shown, []).append(row)
    out = []
    for key, members in sorted(groups.items(), key=lambda item: (item[0][::-1], item[0][0] == "all")):
        line: dict[str, Any] = dict(zip(by, key, strict=True)) | {"videos": len(members)}
        for name in METRICS:
            values = [row[name] for row in members if row.get(name) is not None]
            line[name] = float(np.mean(values)) if values else None
        out.append(line)
    return out
