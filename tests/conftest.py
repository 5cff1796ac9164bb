"""A tiny, randomly initialised mini base: the real classes and the real path, small enough for two cores."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_base import make_tiny_base

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
    return make_tiny_base(tmp_path_factory.mktemp("weights") / "mini")


@pytest.fixture
def tiny_params(tiny_base: Path, tmp_path: Path) -> Path:
    """A params.yaml of two epochs on the tiny base."""
    path = tmp_path / "params.yaml"
    path.write_text(TINY.format(weights=tiny_base))
    return path
