"""`wcpipe prefix`: draw the epoch's prompts and sample the clips before the target clip.

The prefix is the past that all candidates of a group share, so it is sampled once, by the behaviour policy, and
everything later stages need to know about a prompt (poses, labels, text, first frame) is stored with it: they never
draw prompts again.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages import options as o
from stages.common import (
    STOP,
    EpochPaths,
    Stopwatch,
    load_params,
    need_policy,
    open_weights,
    parse_shard,
    report,
    staged,
    track,
)

if TYPE_CHECKING:
    from pipeline.config import Params
    from pipeline.stores import Shard

CODE = (
    1  # raise it when a change of this stage's code changes its results: stores made before are then cleared
)


@staged("prefix")
def run_prefix(params: Params, epoch: str, root: Path, shard: Shard) -> dict[str, Any]:
    """Write `prefixes.zarr` of one epoch; groups that are done stay. Returns counts for the summary."""
    import numpy as np

    from pipeline import rollout
    from pipeline.actions import format_word
    from pipeline.config import epoch_number
    from pipeline.cycle_rollout import reference_frame, with_words
    from pipeline.groups import prefix_arrays, scene_tensors
    from pipeline.plan import plan_inputs, plan_of
    from pipeline.stores import GroupStore, block_size, to_array
    from pipeline.worlds.base import ClipCondition
    from pipeline.worlds.closed_prompts import make_closed_prompts
    from pipeline.worlds.registry import (
        make_prompts,
        policy_digest,
        prompt_source,
        scene_of,
        source_inputs,
    )
    from stages.base import warn_of_sampler

    watch, paths = Stopwatch(), EpochPaths(root, epoch)
    previous = need_policy(EpochPaths(root, params.previous(epoch)))
    first = params.first_prompt(epoch)
    params = params.for_epoch(epoch)
    number = epoch_number(epoch)
    plan = plan_of(params, number)
    clip = plan.clip
    with watch.time("load"):
        policy = policy_digest(paths.base, previous)
        warn_of_sampler(params, paths.base)
        sampler = params.sampler
        world = open_weights(params, paths.base, previous, "old")
    sampling = rollout.Sampling(sampler.steps, sampler.shift, params.seed, number, sampler.cfg)
    with watch.time("prompts"):
        indices = range(first, first + params.prefix.groups)
        actions = world.spec.clip_latents * clip - 1
        source = prompt_source(params.world, world.spec, paths.base)
        if plan.words == "none":
            closed = []
            prompts = make_prompts(source, "rl", indices, params.seed, actions, params.words)
        else:
            closed = make_closed_prompts(
                source, "rl", indices, params.seed, plan, params.cycle, params.words, world.spec
            )
            prompts = [one.prompt for one in closed]
    labels_PT = [np.concatenate([np.zeros(1, np.int64), prompt.labels_A]) for prompt in prompts]
    keys = [
        rollout.group_key(prompt.scene_key, labels_T, clip, policy)
        for prompt, labels_T in zip(prompts, labels_PT, strict=True)
    ]
    guided = sampler.cfg != 1
    example = scene_of(world, prompts[0], guided)
    store = GroupStore.prepare(
        paths.prefixes,
        kind="prefixes",
        arrays=with_words(
            plan, world.spec, prefix_arrays(world.spec, plan.first, example, params.sampler.latents)
        ),
        keys=keys,
        inputs={
            "stage": "prefix",
            "code": CODE,
            "epoch": epoch,
            "first_prompt": first,
            "params": params.dump("seed", "words", "target", "sampler", "prefix")
            | {"world": params.world.name}
            | plan_inputs(params)
            | source_inputs(params.world),
            "policy": policy,
        },
        block=block_size(len(keys)),
    )
    pending, made = store.pending(shard), 0
    for index in track(store.take(pending, STOP.check), f"prefix {epoch}", len(pending)):
        prompt, labels_T = prompts[index], labels_PT[index]
        world.forwards.reset()
        with watch.time("model"):
            scene = scene_of(world, prompt, guided)
            condition = ClipCondition.of(labels_T, prompt.c2w_T44, prompt.K_33)
            latents_CTHW = rollout.sample_prefix(
                world, scene, condition, prompt.c2w_T44, plan.first, sampling, keys[index]
            )
        stored = to_array(latents_CTHW, params.sampler.latents)
        with watch.time("decode"):
            # a prefix that overflowed makes all its candidates missing (stage rollout); its frames must only exist
            frames_FHW3 = rollout.decode_prefix(world, latents_CTHW.nan_to_num(0.0, 0.0, 0.0))
        arrays = {
            "latents": stored,
            "frames": frames_FHW3,
            "first_frame": prompt.first_frame_HW3,
            **{
                name: to_array(tensor, store.specs[name].dtype)
                for name, tensor in scene_tensors(scene, world.spec).items()
            },
            "labels": labels_T,
            "c2w": np.asarray(prompt.c2w_T44, np.float64),
            "K": np.asarray(prompt.K_33, np.float64),
        }
        if closed:
            with watch.time("model"):
                arrays |= reference_frame(world, scene, closed[index], plan, sampling, keys[index])
        record = {
            "prompt": prompt.index,
            "scene": prompt.scene_key,
            "word": format_word(prompt.labels_A),
            "caption": prompt.caption,
            "target_clip": clip,
            "stride": world.spec.stride,
            "clip_latents": world.spec.clip_latents,
            "step": asdict(prompt.step),
            "policy": policy,
            "forwards": {"denoiser": world.forwards.denoiser, "context": world.forwards.context},
            **prompt.about,
            **plan.about(),
            **(closed[index].about() if closed else {}),
        }
        with watch.time("store"):
            store.write(index, arrays, record)
        made += 1
    return finish(store, shard, paths.metrics("prefix"), made, watch) | {"target_clip": clip}


def finish(store: Any, shard: Shard, metrics: Path, made: int, watch: Stopwatch) -> dict[str, Any]:
    """Close a sampling stage: sweep, and once all groups are there write the counted forwards as metrics."""
    from pipeline import files

    missing = len(store.pending())
    if shard.alone or missing == 0:
        store.sweep()
    summary: dict[str, Any] = {"groups": len(store), "made": made}
    if missing == 0:
        counts = [store.record(index)["forwards"] for index in range(len(store))]
        forwards = {name: sum(count[name] for count in counts) for name in ("denoiser", "context")}
        files.write_json(metrics, {"groups": len(store), "forwards": forwards})
        summary["forwards"] = forwards
    else:
        summary["missing"] = missing
    return summary | {"time": watch.rounded()}


def command(
    epoch: o.Epoch,
    root: o.Root = o.ARTIFACTS,
    params: o.ParamsFile = o.PARAMS,
    shard: o.ShardText = o.WHOLE,
    set_: o.Set = None,
    json: o.Json = False,
) -> None:
    """Sample the clips before the target clip, once for each prompt of the epoch.

    Example: wcpipe prefix --epoch e001        (a part of it: --shard 2/4)
    """
    report(run_prefix(load_params(params, set_), epoch, root, parse_shard(shard)), json)
