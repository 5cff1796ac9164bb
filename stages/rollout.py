"""`wcpipe rollout`: sample the candidates of every group and decode them to frames.

A group is one batch over one context cache; that is what makes its candidates bit-identical for any shard count, and
several times cheaper than one by one. A candidate that is not finite stays in its group and is marked: its scores
will be missing, which is not the same as bad.
"""

from __future__ import annotations

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
    open_weights,
    parse_shard,
    report,
    staged,
    track,
)
from stages.prefix import finish

if TYPE_CHECKING:
    import torch

    from pipeline.config import Params
    from pipeline.stores import Shard

CODE = 1  # as in stages.prefix


@staged("rollout")
def run_rollout(params: Params, epoch: str, root: Path, shard: Shard) -> dict[str, Any]:
    """Write `rollouts.zarr` of one epoch; groups that are done stay. Returns counts for the summary."""
    from pipeline import rollout
    from pipeline.config import epoch_number
    from pipeline.cycle_rollout import candidate_arrays, sample_group
    from pipeline.groups import read_past
    from pipeline.plan import plan_inputs, plan_of
    from pipeline.stores import GroupStore, block_size, to_array, to_tensor
    from pipeline.worlds.registry import policy_digest

    watch, paths = Stopwatch(), EpochPaths(root, epoch)
    previous = need_policy(EpochPaths(root, params.previous(epoch)))
    params = params.for_epoch(epoch)
    number = epoch_number(epoch)
    prefixes = need(paths, "prefix", paths.prefixes)
    plan = plan_of(params, number)
    clip = plan.clip
    with watch.time("load"):
        policy = policy_digest(paths.base, previous)
        sampler = params.sampler
        world = open_weights(params, paths.base, previous, "old")
    sampling = rollout.Sampling(sampler.steps, sampler.shift, params.seed, number, sampler.cfg)
    dtype = params.sampler.latents
    store = GroupStore.prepare(
        paths.rollouts,
        kind="rollouts",
        arrays=candidate_arrays(plan, world.spec, params.rollout.candidates, params.sampler.latents),
        keys=prefixes.keys,
        inputs={
            "stage": "rollout",
            "code": CODE,
            "epoch": epoch,
            "params": params.dump("seed", "target", "sampler", "rollout")
            | {"world": params.world.name}
            | plan_inputs(params),
            "policy": policy,
            "prefixes": prefixes.content_digest(),
        },
        block=block_size(len(prefixes)),
    )
    pending, made = store.pending(shard), 0
    for index in track(store.take(pending, STOP.check), f"rollout {epoch}", len(pending)):
        with watch.time("store"):
            past = read_past(prefixes, index)
        world.forwards.reset()
        with watch.time("model"):
            x0_GCTHW = sample_group(
                plan,
                world,
                past.scene,
                past.latents_CTHW,
                past.condition,
                past.c2w_T44,
                clip,
                params.rollout.candidates,
                sampling,
                store.keys[index],
            )
        stored = to_array(x0_GCTHW, dtype)
        with watch.time("decode"):
            frames = rollout.decode_candidates(
                world, past.latents_CTHW, x0_GCTHW.nan_to_num(0.0, 0.0, 0.0), plan.first
            )
        record = {
            "scene": past.scene.key,
            "word": prefixes.record(index)["word"],
            "target_clip": clip,
            "policy": policy,
            "forwards": {"denoiser": world.forwards.denoiser, "context": world.forwards.context},
            "reasons": unusable(past.latents_CTHW, to_tensor(stored, dtype), dtype),
        }
        with watch.time("store"):
            store.write(index, {"latents": stored, "frames": frames}, record)
        made += 1
    return finish(store, shard, paths.metrics("rollout"), made, watch) | {"target_clip": clip}


def unusable(past_CTHW: torch.Tensor, stored_GCTHW: torch.Tensor, dtype: str) -> dict[str, str]:
    """Candidate -> why it is missing, judged by what is stored: float16 turns a finite 1e5 into infinity."""
    import torch

    if not torch.isfinite(past_CTHW).all():
        return {str(g): f"the clips before are not finite in {dtype}" for g in range(len(stored_GCTHW))}
    finite_G = torch.isfinite(stored_GCTHW).flatten(1).all(dim=1)
    return {str(g): f"the sample is not finite in {dtype}" for g in (~finite_G).nonzero().flatten().tolist()}


def command(
    epoch: o.Epoch,
    root: o.Root = o.ARTIFACTS,
    params: o.ParamsFile = o.PARAMS,
    shard: o.ShardText = o.WHOLE,
    set_: o.Set = None,
    json: o.Json = False,
) -> None:
    """Sample the candidates of each group: the target clip, several times from one shared past.

    Example: wcpipe rollout --epoch e001 --shard 1/4
    """
    report(run_rollout(load_params(params, set_), epoch, root, parse_shard(shard)), json)
