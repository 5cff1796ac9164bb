"""A tiny, randomly initialised mini base, for tests and benchmarks that measure everything but the model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch


def make_tiny_base(folder: Path) -> Path:
    """A base folder as `weights/mini` is: transformer (2 layers, width 32), codec, pose network and critic."""
    from pipeline.scorers.critic import Critic, CriticConfig, CriticScorer
    from pipeline.scorers.pose_net import PoseNet, PoseNetConfig, PoseScorer
    from pipeline.worlds.mini.clips import STEP
    from pipeline.worlds.mini.codec import PatchCodec
    from pipeline.worlds.mini.pretrain import PretrainConfig, build_model
    from pipeline.worlds.mini.renderer import MiniScene, render, start_poses

    config = PretrainConfig(channels=8, dim=32, heads=2, layers=2, ffn=48)
    folder.mkdir(parents=True)
    torch.manual_seed(2)
    build_model(config).save_pretrained(folder / "transformer")
    frames = []
    for seed in range(4):
        scene = MiniScene.make(seed)
        frames.append(render(scene, start_poses(scene, np.random.default_rng(seed), 4)))
    PatchCodec.fit(np.concatenate(frames), config.channels).save(folder / "codec.safetensors")
    torch.manual_seed(1)
    PoseScorer(PoseNet(PoseNetConfig(features=8, radius=2, trunk=16, hidden=16)), STEP).save(folder)
    CriticScorer(Critic(CriticConfig(width=8, hidden=8))).save(folder)
    return folder
