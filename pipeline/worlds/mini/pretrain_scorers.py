"""Training of the mini world's pose scorer and critic on true renders of rooms that nothing else uses.

The pose scorer sees motions between none and a third more than commanded, with jitter: it must measure what happened,
not guess which of the 81 actions was meant. Both see frames through the codec, as generated ones are.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline import camera, files, flow
from pipeline.actions import parse_word
from pipeline.digests import digest_tree
from pipeline.errors import UsageError
from pipeline.scorers.critic import CriticScorer
from pipeline.scorers.pose_net import PoseScorer, motion_of_relative, relative_of_motion
from pipeline.scorers.train import TrainOptions, train_critic, train_pose_net
from pipeline.words import TrainingMix
from pipeline.worlds.mini.clips import CLIP, STEP, LabelNoise, execute
from pipeline.worlds.mini.codec import PatchCodec
from pipeline.worlds.mini.load import load_mini
from pipeline.worlds.mini.regenerate import regenerate
from pipeline.worlds.mini.renderer import (
    SPLITS,
    MiniScene,
    SceneBatch,
    place_path,
    render_batch,
    start_poses,
    to_uint8,
)
from pipeline.worlds.mini.text import encode_caption
from pipeline.worlds.wan_world import WanWorld

LABELS = (parse_word("up-1")[0], parse_word("down-1")[0])
STEPS = {"pose": 1500, "critic": 500}
WORDS = TrainingMix(
    translation=2,
    yaw=2,
    pitch=2,
    two_translations=4,
    yaw_and_pitch=4,
    translation_and_pitch=4,
    translation_and_yaw=4,
    hold=(1, 4),
)
"""Of the pose scorer's videos: each family of compounds as often as it is judged; the published mix hardly pitches."""
REPAINTED = 0.6
"""Share of the pose scorer's training videos that the base has repainted."""
LEVELS = (0.0, 0.0, 0.3, 0.4, 0.3)
"""How often repainting starts at each of the sampler's 5 levels. From the two highest the base moves as it likes."""
_JITTER = 0.03


def pose_videos(
    rng: np.random.Generator, batch: int, world: WanWorld | None = None
) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    """Windows uint8 [batch, F, 40, 64, 3] and their true motions [batch, F-1, 4, 4] (relative, camera-to-world).

    F is 4 (a first clip) or 5 (a later clip and the frame before it), drawn for the whole batch. With a `world`,
    REPAINTED of the videos are its regenerations of the renders.
    """
    noise = LabelNoise(compound_first_only=0.15, compound_second_only=0.15, single_ignored=0.15)
    first_clip = rng.random() < 0.4
    count = CLIP if first_clip else 2 * CLIP
    scenes: list[MiniScene] = []
    poses, labels = [], []
    while len(scenes) < batch:
        scene = MiniScene.make(int(rng.integers(*SPLITS["scorer"])))
        word = execute(WORDS.sample(rng, count - 1)[None], noise, rng)[0]
        motion = motion_of_relative(
            np.stack([camera.step_transform(int(label), STEP) for label in word]), STEP
        )
        # policies move by a share of the step that differs between their clips more than inside one
        gains = rng.uniform(0.1, 1.3, (2, 2)).repeat(CLIP, 0)[:, [0, 0, 0, 1, 1]][-len(motion) :]
        motion = (
            motion * gains * rng.uniform(0.8, 1.2, (len(motion), 1)) + rng.normal(size=motion.shape) * _JITTER
        )
        path = np.concatenate([np.eye(4)[None], relative_of_motion(motion, STEP)])
        for i in range(1, count):
            path[i] = path[i - 1] @ path[i]
        start = place_path(scene, rng, path)
        if start is not None:
            scenes.append(scene)
            poses.append(start @ path)
            labels.append(np.concatenate([[0], word]))
    c2w = np.stack(poses)
    frames = render_batch(SceneBatch.stack(scenes), torch.from_numpy(c2w).float())
    shown = to_uint8(frames)
    if world is not None:
        some = slice(0, round(REPAINTED * batch))
        text = torch.stack([encode_caption(scene.caption) for scene in scenes[some]])
        sigmas = flow.sigmas(world.spec.steps, world.spec.shift)[int(rng.choice(len(LEVELS), p=LEVELS)) :]
        generator = torch.Generator().manual_seed(int(rng.integers(2**62)))
        shown[some] = regenerate(
            world, frames[some], np.stack(labels)[some], c2w[some], text, sigmas, generator
        )
    window = slice(0 if first_clip else CLIP - 1, None)
    return shown[:, window], np.stack([camera.relative_poses(path) for path in c2w[:, window]])


def views(rng: np.random.Generator, batch: int) -> NDArray[np.uint8]:
    """Frames uint8 [batch, 40, 64, 3], each of another room."""
    frames: list[tuple[MiniScene, np.ndarray]] = []
    while len(frames) < batch:
        scene = MiniScene.make(int(rng.integers(*SPLITS["scorer"])))
        poses = start_poses(scene, rng, 24)
        clear = poses[scene.clear(poses[:, :3, 3])]
        if len(clear):
            look = camera.StepSize(1.0, float(rng.uniform(0.5, 30)))  # up or down: generated videos pitch too
            frames.append((scene, clear[0] @ camera.step_transform(LABELS[int(rng.integers(2))], look)))
    stacked = np.stack([pose for _, pose in frames])[:, None]
    return to_uint8(
        render_batch(SceneBatch.stack([scene for scene, _ in frames]), torch.from_numpy(stacked).float())
    )[:, 0]


def train(
    part: str, folder: Path, on_step: Callable[[int, float], Any] = lambda step, loss: None
) -> dict[str, Any]:
    """Train "pose" or "critic" into `folder`, which must hold codec.safetensors; resumable. Returns a summary."""
    if part not in STEPS:
        raise UsageError(f"part {part}: choose pose or critic")
    codec = PatchCodec.load(folder / "codec.safetensors")

    def reconstruct(frames_N3HW: torch.Tensor) -> torch.Tensor:
        latents = codec.encode_float(frames_N3HW.permute(0, 2, 3, 1).float())
        return torch.from_numpy(codec.decode(latents)[0]).permute(0, 3, 1, 2).float() / 255

    options = TrainOptions(
        steps=STEPS[part],
        batch=16 if part == "pose" else 64,
        bf16=True,
        checkpoint=folder / f"{part}.state.safetensors",
    )
    curve: list[float] = []

    def on_progress(done: int, total: int, metrics: dict[str, float]) -> None:
        curve.append(metrics["loss"])
        on_step(done - 1, metrics["loss"])

    if part == "pose":
        world = load_mini(folder)
        PoseScorer(
            train_pose_net(
                partial(pose_videos, world=world),
                STEP,
                options,
                reconstruct=reconstruct,
                on_progress=on_progress,
            ),
            STEP,
        ).save(folder)
    else:
        CriticScorer(train_critic(views, options, reconstruct=reconstruct, on_progress=on_progress)).save(
            folder
        )
    loss = float(np.mean(curve[-100:])) if curve else None
    about: dict[str, Any] = {
        "part": part,
        "steps": options.steps,
        "batch": options.batch,
        "lr": options.lr,
        "seed": options.seed,
        "loss": loss,
    }
    if part == "pose":  # the base whose pictures it learned from
        about["base"] = digest_tree(folder / "transformer")
    files.write_bytes(folder / f"{part}.training.json", (json.dumps(about, indent=1) + "\n").encode())
    return about
