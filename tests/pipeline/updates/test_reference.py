"""The numbers of an update of the mini world, against stored ones: a change of code that moves them must say why.

Within rounding of another processor; on one machine they are the same to the last bit. Made again, after a change that
is meant to move them, with

    python -m tests.pipeline.updates.test_reference > tests/golden/update_mini.json
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from pipeline.digests import digest_tensors
from pipeline.updates.config import ParamsConfig, UpdateConfig
from pipeline.updates.loop import update_epoch
from pipeline.updates.policy import Policy, prepare_params
from pipeline.worlds.mini.load import load_mini
from tests.pipeline.updates.test_loop_world import group
from tests.tiny_base import make_tiny_base

STORED = Path(__file__).parents[2] / "golden" / "update_mini.json"
CONFIGS = {
    "full": {"old_update": "epoch"},
    "lora": {"old_update": "step", "params": ParamsConfig(kind="lora", rank=4)},
    "self": {"old": "self", "space": "v"},
}


def curve(base: Path, name: str) -> dict[str, list[float]]:
    """Metrics of two epochs on a first and a second clip, and (beside them) the digest of the live weights."""
    settings = {"steps": 3, "timesteps": 2, "lr": 1e-3, "accumulation": 3, "micro_batch": 4}
    config = UpdateConfig(**settings | CONFIGS[name])
    world = load_mini(base)
    groups = [group(world, clip) for clip in (1, 2)]
    prepare_params(world.model, config.params, 5)
    policy = Policy(world.model, config, 5)
    found = [update_epoch(world, policy, groups, config, 7, epoch) for epoch in (1, 2)]
    kept = ("loss", "grad_norm", "v_gap", "x0_norm", "loss_plus", "loss_minus")
    print(f"{name}: live {digest_tensors(policy.sets['live'])}", file=sys.stderr)
    return {key: [metrics[key] for metrics in found] for key in kept}


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_an_update_gives_the_stored_numbers(tiny_base: Path, name: str) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = curve(tiny_base, name)
    finally:
        torch.set_num_threads(threads)
    for key, values in json.loads(STORED.read_text())[name].items():
        assert found[key] == pytest.approx(values, rel=2e-3, abs=1e-6), key


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        made = make_tiny_base(Path(folder) / "mini")
        print(json.dumps({name: curve(made, name) for name in sorted(CONFIGS)}, indent=2))
