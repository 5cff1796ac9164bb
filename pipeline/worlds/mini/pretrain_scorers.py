"""Training of the mini world's pose scorer and critic on true renders of rooms that nothing else uses.

The pose scorer sees motions between none and a third more than commanded, with jitter: it must measure what happened,
not guess which of the 81 actions was meant. Both see frames through the codec, as generated ones are.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline import camera, files
from pipeline.actions import parse_word
from pipeline.errors import UsageError
from pipeline.scorers.critic import CriticScorer
from pipeline.scorers.pose_net import PoseScorer, motion_of_relative, relative_of_motion
from pipeline.scorers.train import TrainOptions, train_critic, train_pose_net
from pipeline.words import TrainingMix
from pipeline.worlds.mini.clips import STEP, LabelNoise, execute
from pipeline.worlds.mini.codec import PatchCodec
from pipeline.worlds.mini.renderer import (
    SPLITS,
    MiniScene,
    SceneBatch,
    place_path,
    render_batch,
    start_poses,
    to_uint8,
)

LABELS = (parse_word("up-1")[0], parse_word("down-1")[0])
STEPS = {"pose": 2000, "critic": 500}
FRAMES = 5
_JITTER = 0.05


def pose_videos(rng: np.random.Generator, batch: int) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    """Videos uint8 [batch, 5, 40, 64, 3] and their true motions [batch, 4, 4, 4] (relative, camera-to-world)."""
    mix, noise = (
        TrainingMix(hold=(1, 4)),
        LabelNoise(compound_first_only=0.15, compound_second_only=0.15, single_ignored=0.15),
    )
    scenes: list[MiniScene] = []
    poses = []
    while len(scenes) < batch:
        scene = MiniScene.make(int(rng.integers(*SPLITS["scorer"])))
        labels = execute(mix.sample(rng, FRAMES - 1)[None], noise, rng)[0]
        motion = motion_of_relative(
            np.stack([camera.step_transform(int(label), STEP) for label in labels]), STEP
        )
        motion = motion * rng.uniform(0.2, 1.3, (len(motion), 1)) + rng.normal(size=motion.shape) * _JITTER
        path = np.concatenate([np.eye(4)[None], relative_of_motion(motion, STEP)])
        for i in range(1, FRAMES):
            path[i] = path[i - 1] @ path[i]
        start = place_path(scene, rng, path)
        if start is not None:
            scenes.append(scene)
            poses.append(start @ path)
    stacked = np.stack(poses)
    frames = to_uint8(render_batch(SceneBatch.stack(scenes), torch.from_numpy(stacked).float()))
    return frames, np.stack([camera.relative_poses(path) for path in stacked])


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
        PoseScorer(
            train_pose_net(pose_videos, STEP, options, reconstruct=reconstruct, on_progress=on_progress), STEP
        ).save(folder)
    else:
        CriticScorer(train_critic(views, options, reconstruct=reconstruct, on_progress=on_progress)).save(
            folder
        )
    loss = float(np.mean(curve[-100:])) if curve else None
    about = {
        "part": part,
        "steps": options.steps,
        "batch": options.batch,
        "lr": options.lr,
        "seed": options.seed,
        "loss": loss,
    }
    files.write_bytes(folder / f"{part}.training.json", (json.dumps(about, indent=1) + "\n").encode())
    return about
