"""A tiny, randomly initialised mini base: the real classes and the real path, small enough for two cores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

TINY = """
seed: 0
world: {{weights: {weights}}}
words: {{hold: [1, 3]}}
target: {{n_min: 1, n_max: 2}}
sampler: {{steps: 2}}
prefix: {{groups: 3}}
rollout: {{candidates: 4}}
score: {{weights: {weights}}}
update: {{timesteps: 1, accumulation: 4}}
epochs:
  e001: {{prev: e000}}
  e002: {{prev: e001}}
"""


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base folder as `weights/mini` is: transformer (2 layers, width 32), codec, pose network and critic."""
    from pipeline.scorers.critic import Critic, CriticConfig, CriticScorer
    from pipeline.scorers.pose_net import PoseNet, PoseNetConfig, PoseScorer
    from pipeline.worlds.mini.clips import STEP
    from pipeline.worlds.mini.codec import PatchCodec
    from pipeline.worlds.mini.pretrain import PretrainConfig, build_model
    from pipeline.worlds.mini.renderer import MiniScene, render, start_poses

    folder = tmp_path_factory.mktemp("weights") / "mini"
    config = PretrainConfig(channels=8, dim=32, heads=2, layers=2, ffn=48)
    folder.mkdir()
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


@pytest.fixture
def tiny_params(tiny_base: Path, tmp_path: Path) -> Path:
    """A params.yaml of two epochs on the tiny base."""
    path = tmp_path / "params.yaml"
    path.write_text(TINY.format(weights=tiny_base))
    return path
