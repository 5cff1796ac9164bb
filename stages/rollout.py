"""`wcpipe rollout`: sample the candidates of every group and decode them to frames.

A group is one batch over one context cache; that is what makes its candidates bit-identical for any shard count, and
several times cheaper than one by one. A candidate that is not finite stays in its group and is marked: its scores
will be missing, which is not the same as bad.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages import options as o
from stages.common import EpochPaths, Stopwatch, load_params, parse_shard, report, staged, track
from stages.prefix import finish

if TYPE_CHECKING:
    from pipeline.config import Params
    from pipeline.stores import Shard

CODE = 1  # as in stages.prefix


@staged("rollout")
def run_rollout(params: Params, epoch: str, root: Path, shard: Shard) -> dict[str, Any]:
    """Write `rollouts.zarr` of one epoch; groups that are done stay. Returns counts for the summary."""
    import torch

    from pipeline import rollout
    from pipeline.config import epoch_number
    from pipeline.groups import read_past, rollout_arrays
    from pipeline.stores import GroupStore, to_array
    from pipeline.worlds.registry import open_policy, policy_digest

    watch, paths = Stopwatch(), EpochPaths(root, epoch)
    previous = EpochPaths(root, params.previous(epoch))
    params = params.for_epoch(epoch)
    number = epoch_number(epoch)
    remedy = f"run `wcpipe prefix --epoch {epoch}`"
    prefixes = GroupStore.open(paths.prefixes, remedy).require_complete(remedy)
    clip = rollout.target_clip(number, params.target.n_min, params.target.n_max)
    with watch.time("load"):
        policy = policy_digest(paths.base, previous.policy)
        world = open_policy(params.world.name, paths.base, previous.policy, "old", params.update, params.seed)
    sampling = rollout.Sampling(params.sampler.steps, params.sampler.shift, params.seed, number)
    store = GroupStore.prepare(
        paths.rollouts,
        kind="rollouts",
        arrays=rollout_arrays(world.spec, clip, params.rollout.candidates, params.sampler.latents),
        keys=prefixes.keys,
        inputs={
            "stage": "rollout",
            "code": CODE,
            "epoch": epoch,
            "params": params.dump("seed", "target", "sampler", "rollout") | {"world": params.world.name},
            "policy": policy,
            "prefixes": prefixes.content_digest(),
        },
    )
    pending = store.pending(shard)
    for index in track(pending, f"rollout {epoch}", len(pending)):
        with watch.time("store"):
            past = read_past(prefixes, index)
        world.forwards.reset()
        with watch.time("model"):
            x0_GCTHW = rollout.sample_candidates(
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
        finite_G = torch.isfinite(x0_GCTHW).flatten(1).all(dim=1)
        with watch.time("decode"):
            frames = rollout.decode_candidates(
                world, past.latents_CTHW, x0_GCTHW.nan_to_num(0.0, 0.0, 0.0), clip
            )
        record = {
            "scene": past.scene.key,
            "word": prefixes.record(index)["word"],
            "target_clip": clip,
            "policy": policy,
            "forwards": {"denoiser": world.forwards.denoiser, "context": world.forwards.context},
            "reasons": {str(g): "the sample is not finite" for g in (~finite_G).nonzero().flatten().tolist()},
        }
        with watch.time("store"):
            store.write(
                index, {"latents": to_array(x0_GCTHW, params.sampler.latents), "frames": frames}, record
            )
    return finish(store, shard, paths.metrics("rollout"), len(pending), watch) | {"target_clip": clip}


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
