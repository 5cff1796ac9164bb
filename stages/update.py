"""`wcpipe update`: one epoch of policy updates from the selected candidates.

An epoch's policy is written whole at the end or not at all; killed in the middle it starts again from the previous
epoch's checkpoint, with the same keyed noise, to the same bits. The checkpoint keeps what it was made from, so that a
second call, or a long run that is started again, sees that it is finished even when the bulky stores are gone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages import options as o
from stages.common import (
    STOP,
    EpochPaths,
    Stopwatch,
    load_params,
    need,
    need_policy,
    report,
    staged,
    step_bar,
)

if TYPE_CHECKING:
    from pipeline.config import Params
    from pipeline.stores import GroupStore
    from pipeline.updates.loop import TrainingGroup
    from pipeline.worlds.base import WorldModel

CODE = 1  # as in stages.prefix


def chain(params: Params, epoch: str, root: Path) -> dict[str, Any]:
    """All that an epoch's policy follows from, without its stores: parameters, base, previous policy, engines."""
    from pipeline import rewards
    from pipeline.plan import plan_inputs
    from pipeline.scorers.registry import engine_digest
    from pipeline.updates.checkpoint import checkpoint_digest
    from pipeline.worlds.registry import base_digest, source_inputs
    from stages import advantage, prefix, rollout, score

    paths, previous = EpochPaths(root, epoch), need_policy(EpochPaths(root, params.previous(epoch)))
    first, progress = params.first_prompt(epoch), params.progress(epoch)
    params = params.for_epoch(epoch)
    sections = ("seed", "words", "target", "sampler", "prefix", "rollout", "rewards", "advantage", "update")
    return {
        "stage": "update",
        "code": [CODE, *(module.CODE for module in (prefix, rollout, score, advantage))],
        "epoch": epoch,
        "first_prompt": first,
        "params": params.dump(*sections) | {"world": params.world.name} | plan_inputs(params) | source_inputs(params.world),
        "base": base_digest(paths.base),
        "previous": checkpoint_digest(previous),
        "rewards": {name: rewards.find(name).version for name in params.advantage.weights},
        **advantage.warming(params, progress),
        "engines": {name: engine_digest(name, Path(params.score.weights)) for name in params.score.scorers},
    }


def is_finished(params: Params, epoch: str, root: Path) -> bool:
    """Whether the epoch's policy is there and was made from these parameters and the present previous policy."""
    from pipeline.errors import CheckpointError
    from pipeline.updates.checkpoint import read_state

    try:
        return bool(
            read_state(EpochPaths(root, epoch).policy)["state"]["extra"]["chain"]
            == chain(params, epoch, root)
        )
    except (CheckpointError, KeyError):
        return False


@staged("update")
def run_update(params: Params, epoch: str, root: Path) -> dict[str, Any]:
    """Write `policy/` of one epoch, unless it is there and was made from the same inputs.

    A finished epoch whose stores were thinned out (`wcpipe run --keep`) is known by its policy alone.
    """
    from pipeline import files
    from pipeline.config import epoch_number
    from pipeline.errors import CheckpointError
    from pipeline.updates.checkpoint import read_state
    from pipeline.updates.loop import update_epoch
    from pipeline.updates.policy import Policy, prepare_params
    from pipeline.worlds.registry import open_world

    watch, paths = Stopwatch(), EpochPaths(root, epoch)
    previous = need_policy(EpochPaths(root, params.previous(epoch)))
    extra: dict[str, Any] = {"chain": chain(params, epoch, root)}
    written = {"prefix": paths.prefixes, "rollout": paths.rollouts, "advantage": paths.advantages}
    if not all(path.exists() for path in written.values()) and is_finished(params, epoch, root):
        return {"made": 0}
    params = params.for_epoch(epoch)
    stores = {path.stem: need(paths, stage, path) for stage, path in written.items()}
    extra["stores"] = {name: store.content_digest() for name, store in stores.items()}
    try:
        if paths.metrics("update").exists() and read_state(paths.policy)["state"]["extra"] == extra:
            return {"made": 0}
    except CheckpointError:
        pass  # none yet, or damaged: it is made again from the previous one

    with watch.time("load"):
        world = open_world(params.world.name, paths.base, params.sampler.truncate_timestep)
        prepare_params(world.model, params.update.params, params.seed)
        policy = Policy(world.model, params.update, params.seed)
        policy.load(previous)
    advantages = stores["advantages"]
    samples = sum(int(advantages.read(index, "selected").sum()) for index in range(len(advantages)))
    with step_bar(f"update {epoch}", samples) as advance, watch.time("model"):

        def on_progress(done: int, total: int, metrics: dict[str, float]) -> None:
            advance(done)
            STOP.check(
                "before the epoch's policy was written: the steps of this update are lost, what was finished before "
                "stays; run the same command again to start the update again"
            )

        groups = training_groups(world, stores["prefixes"], stores["rollouts"], advantages)
        found = update_epoch(
            world, policy, groups, params.update, params.seed, epoch_number(epoch), on_progress, samples
        )
    metrics = {name: value if math.isfinite(value) else None for name, value in sorted(found.items())}
    with watch.time("store"):
        files.write_json(paths.metrics("update"), metrics)
        policy.save(paths.policy, extra)
    shown: dict[str, Any] = {
        name: metrics[name] for name in ("loss", "v_gap", "grad_norm") if name in metrics
    }
    return {"made": 1, "samples": samples, **shown, "time": watch.rounded()}


def training_groups(
    world: WorldModel, prefixes: GroupStore, rollouts: GroupStore, advantages: GroupStore
) -> Iterator[TrainingGroup]:
    """The selected candidates, one group at a time in group order; a group without any is passed over.

    Candidates that are whole videos (`rollout.mode: cycle`) have a past of their own, so each is a group of one; only
    its last clip is trained.
    """
    import torch

    from pipeline.groups import read_past
    from pipeline.plan import first_clip
    from pipeline.rollout import clip_slice
    from pipeline.updates.loop import TrainingGroup

    for index in range(len(advantages)):
        order = advantages.read(index, "order")
        chosen = [int(candidate) for candidate in order if candidate >= 0]
        if not chosen:
            continue
        past = read_past(prefixes, index)
        at = clip_slice(world, past.clip)
        seed = int(prefixes.about["inputs"]["params"]["seed"])
        latents_NCTHW = rollouts.read_tensor(index, "latents")[chosen].float()
        r_N = torch.from_numpy(advantages.read(index, "r")[chosen]).float()
        parts: list[tuple[slice, torch.Tensor, torch.Tensor]] = [
            (slice(None), past.latents_CTHW, latents_NCTHW)
        ]
        if first_clip(prefixes.record(index)) < past.clip:
            parts = [
                (slice(n, n + 1), video[:, : at.start], video[None, :, at])
                for n, video in enumerate(latents_NCTHW)
            ]
        for rows, history_CTHW, x0_NCTHW in parts:
            yield TrainingGroup(
                key=rollouts.keys[index],
                scene=past.scene,
                history_CTHW=history_CTHW,
                context=world.select_context(past.c2w_T44[: at.stop], past.clip - 1, seed),
                condition=past.condition,
                clip=past.condition.select(at),
                x0_NCTHW=x0_NCTHW,
                r_N=r_N[rows],
                candidates=chosen[rows],
                loss_mask_T=world.loss_mask_T(past.clip - 1),
            )


def command(
    epoch: o.Epoch,
    root: o.Root = o.ARTIFACTS,
    params: o.ParamsFile = o.PARAMS,
    set_: o.Set = None,
    json: o.Json = False,
) -> None:
    """Train the policy for one epoch on the selected candidates.

    Example: wcpipe update --epoch e001
    """
    report(run_update(load_params(params, set_), epoch, root), json)
