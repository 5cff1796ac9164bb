"""Updates of tiny 5B and 8B networks, for any number of ranks: a program for torchrun, a function for one process.

    torchrun --nproc-per-node 2 tests/pipeline/updates/ranks_job.py OUT CASE...

writes the policy of each case to OUT/CASE-<ranks> and what happened on each rank to OUT/CASE-<ranks>.<rank>.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.errors import WcpipeError
from pipeline.updates.config import ParamsConfig, UpdateConfig
from pipeline.updates.loop import TrainingGroup, update_epoch
from pipeline.updates.policy import Policy
from pipeline.updates.ranks import Ranks, distribute, joined
from pipeline.updates.trained import prepare_params
from pipeline.worlds.base import ClipCondition, MemoryRule, Scene, WorldSpec
from pipeline.worlds.hunyuan import WorldPlayHunyuan
from pipeline.worlds.hunyuan_world import HunyuanWorld
from pipeline.worlds.wan import WorldPlayWan
from pipeline.worlds.wan_world import WanWorld

LORA = ParamsConfig(kind="lora", rank=2, alpha=4)
SETTINGS: dict[str, Any] = {"steps": 3, "timesteps": 2, "lr": 3e-4, "accumulation": 4, "micro_batch": 3}


@dataclass(frozen=True)
class Case:
    """`sizes` are samples of the groups; every second group is a first clip, which has no context."""

    sizes: Sequence[int]
    config: UpdateConfig
    network: str = "wan"
    shard: int | None = None
    checkpointing: bool = False
    epochs: Sequence[int] = (1, 2)
    start: str | None = None
    spoiled: bool = False


CASES = {
    "full": Case((3, 0, 1, 3), UpdateConfig(**SETTINGS)),
    "step": Case(
        (3, 4),
        UpdateConfig(**SETTINGS | {"old_update": "step", "accumulation": 2}),
        shard=1,
        checkpointing=True,
    ),
    "lora": Case((3, 2, 2), UpdateConfig(**SETTINGS | {"params": LORA})),
    "idle": Case((1, 2), UpdateConfig(**SETTINGS | {"accumulation": 1, "old": "self"})),
    "text": Case((2, 3, 1), UpdateConfig(**SETTINGS | {"params": LORA, "old_update": "step"}), "hunyuan"),
    "text_full": Case((2, 1), UpdateConfig(**SETTINGS), "hunyuan", epochs=(1,)),
    "resumed": Case((3, 0, 1, 3), UpdateConfig(**SETTINGS), start="full-1", epochs=(3,)),
    "spoiled": Case((3, 1), UpdateConfig(**SETTINGS), spoiled=True, epochs=(1,)),
}


def make_world(network: str) -> WanWorld:
    torch.manual_seed(0)
    memory = MemoryRule(budget=8, recent=4)
    if network == "wan":
        model: Any = WorldPlayWan(
            patch_size=(1, 1, 1),
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=3,
            out_channels=3,
            text_dim=8,
            freq_dim=16,
            ffn_dim=32,
            num_layers=2,
            rope_max_seq_len=32,
        )
        spec = WorldSpec(latent_shape=(3, 2, 4), frame_size=(2, 4), memory=memory)
        return WanWorld(model.eval(), None, spec)  # type: ignore[arg-type]  # no frame is made
    model = WorldPlayHunyuan(
        in_channels=7,
        out_channels=3,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        num_refiner_layers=1,
        text_embed_dim=8,
        text_embed_2_dim=12,
        image_embed_dim=6,
        rope_axes_dim=(4, 6, 6),
    )
    spec = WorldSpec(latent_shape=(3, 2, 4), frame_size=(2, 4), memory=memory, condition_latent=True)
    return HunyuanWorld(model.eval(), None, spec)  # type: ignore[arg-type]


class Groups:
    """Random groups, made when asked for; `loaded` says which a rank asked for."""

    def __init__(self, world: WanWorld, case: Case) -> None:
        self.world, self.case, self.sizes, self.loaded = world, case, case.sizes, []

    def __getitem__(self, index: int) -> TrainingGroup:
        self.loaded.append(index)
        g = torch.Generator().manual_seed(index)
        first = index % 2 == 1
        count, latents = self.case.sizes[index], 4 if first else 8
        c2w = np.tile(np.eye(4), (latents, 1, 1))
        c2w[:, 2, 3] = np.arange(latents) * 0.4
        condition = ClipCondition.of(np.full(latents, 9 + index), c2w, np.diag([0.5, 0.8, 1.0]))
        x0 = torch.randn(count, 3, 4, 2, 4, generator=g)
        if self.case.spoiled and index == 1:
            x0[-1, 0, 1, 0, 0] = float("nan")
        return TrainingGroup(
            key=f"group{index}",
            scene=Scene(torch.randn(3, 2, 4, generator=g), torch.randn(5, 8, generator=g), f"scene{index}"),
            history_CTHW=torch.randn(3, 1 if first else 4, 2, 4, generator=g),
            context=[] if first else [0, 1, 3],
            condition=condition,
            clip=condition.select(slice(latents - 4, latents)),
            x0_NCTHW=x0,
            r_N=torch.rand(count, generator=g),
            candidates=list(range(count)),
            loss_mask_T=self.world.loss_mask_T(0 if first else 1),
        )


def update(name: str, ranks: Ranks, out: Path) -> dict[str, Any]:
    """Run one case and save its policy. Returns metrics, loaded groups, and this rank's error, if there was one."""
    case = CASES[name]
    ranks.shard = case.shard or ranks.size
    world = make_world(case.network)
    prepare_params(world.model, case.config.params, seed=3)
    if case.checkpointing:
        world.model.enable_gradient_checkpointing()
    distribute(world.model, ranks)
    policy = Policy(world.model, case.config, 3, ranks)
    if case.start is not None:
        policy.load(out / case.start)
    groups = Groups(world, case)
    steps: list[int] = []
    found: dict[str, Any] = {"digest": policy.digest()}
    try:
        for epoch in case.epochs:
            found["metrics"] = update_epoch(
                world, policy, groups, case.config, 7, epoch, lambda done, *_: steps.append(done)
            )
    except WcpipeError as error:
        found |= {"error": type(error).__name__, "code": error.exit_code, "said": str(error)}
    found |= {"loaded": groups.loaded, "steps": steps, "step": policy.step}
    policy.save(out / f"{name}-{ranks.size}", {"case": name})
    shards = {key: value.numel() for key, value in policy.sets["live"].items()}
    found["held"] = sum(shards.values())
    (out / f"{name}-{ranks.size}.{ranks.index}.json").write_text(json.dumps(found))
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    with joined() as everyone:
        for wanted in sys.argv[2:]:
            update(wanted, everyone, Path(sys.argv[1]))
