"""Does the camera do what it was told? Basic and compound actions, judged by the pose scorer and by the oracle.

One case is one held-out room and one action held for the whole video, as in both papers: the 8 keys, and the compounds
of a translation with a rotation or of two keys of a kind. The cases, their rooms and their noise are fixed by a seed
and shared by every policy that is compared. The mini world's oracle judges; it is never a reward.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline import actions
from pipeline.benchmark.config import AccuracyConfig
from pipeline.camera import frame_labels
from pipeline.errors import NumericsError
from pipeline.rewards.action import ActionConfig, score_action
from pipeline.rollout import Sampling, sample_prefix
from pipeline.scorers.critic import CriticScorer
from pipeline.scorers.pose_net import PoseScorer
from pipeline.words import BASIC_FAMILIES, FAMILIES
from pipeline.worlds.base import ClipCondition
from pipeline.worlds.mini import oracle
from pipeline.worlds.mini.clips import CLIP, INTRINSICS_33, STEP
from pipeline.worlds.mini.prompts import Prompt, make_prompt_for_word
from pipeline.worlds.mini.renderer import MiniScene, render
from pipeline.worlds.wan_world import WanWorld

BASIC = tuple(label for family in BASIC_FAMILIES for label in FAMILIES[family])
COMPOUND = tuple(
    label for family, labels in FAMILIES.items() if family not in BASIC_FAMILIES for label in labels
)
# The scorer is asked the oracle's question; the published best of five thresholds differs from video to video.
SAME_LINE = ActionConfig(taus=[oracle.THRESHOLD], rotation=oracle.THRESHOLD)
CHUNK = 16  # cases that are judged together; the oracle's own chunk


@dataclass(frozen=True)
class Case:
    """One prompt of the benchmark: `kind` is "basic" or "compound"."""

    kind: str
    prompt: Prompt


def held(label: int, count: int) -> NDArray[np.int64]:
    """One action for `count` steps. A move with a pitch turns its pitch round half-way: held on, it leaves the room."""
    word = np.full(count, label)
    if label in FAMILIES["translation_and_pitch"]:
        word[(count + 1) // 2 :] = actions.label_of(
            tuple({"up": "down", "down": "up"}.get(k, k) for k in actions.keys_of(label))
        )
    return word


def make_cases(config: AccuracyConfig, latents: int) -> list[Case]:
    """The cases, the same for every policy: label number i of its kind, held for `latents` - 1 actions."""
    cases = []
    for kind, count, labels in (("basic", config.basic, BASIC), ("compound", config.compound, COMPOUND)):
        for i in range(count):
            word = held(labels[i % len(labels)], latents - 1)
            index = i + (0 if kind == "basic" else 100_000)
            cases.append(Case(kind, make_prompt_for_word(config.split, index, config.seed, word)))
    return cases


@torch.no_grad()
def generate(
    world: WanWorld, prompt: Prompt, clips: int, seed: int, steps: int, shift: float
) -> NDArray[np.uint8]:
    """Sample the whole video of a prompt, uint8 [F, H, W, 3], clip by clip; noise keyed by seed and case.

    Raises NumericsError when the sample is not finite: turned into pixels, it would be judged like any video.
    """
    scene = world.encode_scene(prompt.first_frame_HW3, prompt.caption, prompt.scene_key)
    labels = np.concatenate([[0], prompt.labels_A])
    condition = ClipCondition.of(labels, prompt.c2w_T44, INTRINSICS_33)
    sampling = Sampling(steps=steps, shift=shift, seed=seed, epoch=0)
    latents = sample_prefix(
        world, scene, condition, prompt.c2w_T44, clips + 1, sampling, f"evaluate/{prompt.index}"
    )
    if not torch.isfinite(latents).all():
        word = actions.format_word(prompt.labels_A.tolist())
        raise NumericsError(
            f"evaluate: the policy's sample of case {prompt.index} ({word}) is not finite; "
            "the policy has diverged: lower update.lr, or judge an earlier epoch"
        )
    return world.decode(latents)[0]


def _static(case: Case) -> NDArray[np.uint8]:
    return np.repeat(case.prompt.first_frame_HW3[None], len(case.prompt.c2w_T44), axis=0)


def _render(case: Case) -> NDArray[np.uint8]:
    return render(MiniScene.make(case.prompt.scene_seed), case.prompt.start_44 @ case.prompt.c2w_T44)


# Videos that no policy made, uint8 [F, H, W, 3]. What stands still and what obeys perfectly are the floor and the
# ceiling that every other number must be read between, estimators' errors included.
CONTROLS: dict[str, Callable[[Case], NDArray[np.uint8]]] = {"static": _static, "render": _render}


def evaluate_policy(
    world: WanWorld,
    pose: PoseScorer,
    critic: CriticScorer,
    config: AccuracyConfig,
    steps: int,
    shift: float,
    on_case: Callable[[int, int], Any] = lambda done, total: None,
) -> list[dict[str, Any]]:
    """One row a case: kind, word, accuracies by oracle and scorer, quality, PSNR to the commanded view, failures.

    Accuracies are means over the case's frames. PSNR compares with the true view at the *commanded* pose, so it falls
    both for blur and for a camera that is elsewhere; `residual` is the oracle's, blind to where the camera is.
    """
    cases = make_cases(config, world.spec.clip_latents * config.clips)

    def sample(case: Case) -> NDArray[np.uint8]:
        return generate(world, case.prompt, config.clips, config.seed, steps, shift)

    return _judged(cases, sample, pose, critic, on_case)


def evaluate_control(
    control: str,
    pose: PoseScorer,
    critic: CriticScorer,
    config: AccuracyConfig,
    on_case: Callable[[int, int], Any] = lambda done, total: None,
) -> list[dict[str, Any]]:
    """Rows as `evaluate_policy`, of the videos of `CONTROLS`: the same cases, judged alike."""
    return _judged(make_cases(config, CLIP * config.clips), CONTROLS[control], pose, critic, on_case)


def _judged(
    cases: list[Case],
    video_of: Callable[[Case], NDArray[np.uint8]],
    pose: PoseScorer,
    critic: CriticScorer,
    on_case: Callable[[int, int], Any],
) -> list[dict[str, Any]]:
    """Make and judge the videos in chunks: a long benchmark can be stopped between cases and holds few frames."""
    rows: list[dict[str, Any]] = []
    for start in range(0, len(cases), CHUNK):
        chunk, videos = cases[start : start + CHUNK], []
        for number, case in enumerate(chunk, start + 1):
            videos.append(video_of(case))
            on_case(number, len(cases))
        rows += judge(chunk, np.stack(videos), pose, critic)
    return rows


def judge(
    cases: list[Case], videos_BFHW3: NDArray[np.uint8], pose: PoseScorer, critic: CriticScorer
) -> list[dict[str, Any]]:
    """Rows of `evaluate_policy` for given videos (true renders too: the floor of every estimator)."""
    scenes = [MiniScene.make(case.prompt.scene_seed) for case in cases]
    labels_BF = np.stack([frame_labels(np.concatenate([[0], case.prompt.labels_A]), 1) for case in cases])
    starts = np.stack([case.prompt.start_44 for case in cases])
    track = oracle.track(scenes, videos_BFHW3, starts, labels_BF)
    hits = oracle.accuracy(track.labels_BF(), labels_BF)
    relative = pose.relative(videos_BFHW3)
    rows = []
    for b, case in enumerate(cases):
        scored = score_action(relative[b], labels_BF[b], SAME_LINE, STEP, 1)
        truth = render(scenes[b], case.prompt.start_44 @ case.prompt.c2w_T44).astype(np.float64)
        error = ((videos_BFHW3[b].astype(np.float64) - truth) ** 2).mean((1, 2, 3))[1:]
        moved = np.linalg.inv(track.c2w_BF44[b, 0]) @ track.c2w_BF44[b, -1]
        rows.append(
            {
                "kind": case.kind,
                "word": actions.format_word(case.prompt.labels_A.tolist()),
                "scene": case.prompt.scene_seed,
                "oracle_joint": float(hits["joint"][b].mean()),
                "oracle_fine": float(hits["fine"][b].mean()),
                "oracle_failed": float(track.failed_BF[b, 1:].mean()),
                "residual": float(track.residual_BF[b, 1:].mean()),
                "scorer_joint": scored.joint,
                "scorer_fine": scored.fine,
                "quality": float(critic.score(videos_BFHW3[b, 1:]).mean()),
                "psnr": float((10 * np.log10(255**2 / np.maximum(error, 1e-6))).mean()),
                "moved": float(np.linalg.norm(moved[:3, 3])),
            }
        )
    return rows
