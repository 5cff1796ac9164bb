"""`wcpipe update`: one epoch of policy updates from the selected candidates.

An epoch's policy is written whole at the end or not at all; killed in the middle it starts again from the previous
epoch's checkpoint, with the same keyed noise, to the same bits. The checkpoint keeps what it was made from, so that a
second call, or a long run that is started again, sees that it is finished even when the bulky stores are gone.

Under torchrun (`torchrun --nproc-per-node 8 -m stages.cli update --epoch e001`) all ranks run this command: rank 0
decides, writes and speaks, the others share the work.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

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
    from pipeline.updates.ranks import Ranks

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
        "params": _made_with(params.dump(*sections))
        | {"world": params.world.name}
        | plan_inputs(params)
        | source_inputs(params.world),
        "base": base_digest(paths.base),
        "previous": checkpoint_digest(previous),
        "rewards": {name: rewards.find(name).version for name in params.advantage.weights},
        **advantage.warming(params, progress),
        "engines": {name: engine_digest(name, Path(params.score.weights)) for name in params.score.scorers},
    }


def _made_with(sections: dict[str, Any]) -> dict[str, Any]:
    """Without `update.execution`, which changes how an update is computed and not what."""
    update = {name: value for name, value in sections["update"].items() if name != "execution"}
    return sections | {"update": update}


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

    A finished epoch whose stores were thinned out (`wcpipe run --keep`) is known by its policy alone. Under torchrun
    all ranks return the same summary. Raises RankLost when another rank dies, EndedElsewhere when one has said why.
    """
    from pipeline.updates.ranks import joined

    with joined(params.for_epoch(epoch).update.execution.shard) as ranks:
        return _update(params, epoch, root, ranks)


def _update(params: Params, epoch: str, root: Path, ranks: Ranks) -> dict[str, Any]:
    from pipeline import files
    from pipeline.config import epoch_number
    from pipeline.updates.loop import update_epoch
    from pipeline.updates.policy import Policy
    from pipeline.updates.ranks import distribute
    from pipeline.updates.stored import StoredGroups
    from pipeline.updates.trained import prepare_params
    from pipeline.worlds.registry import open_world

    watch, paths = Stopwatch(), EpochPaths(root, epoch)
    extra: dict[str, Any] | None = None
    with ranks.agreed():  # rank 0 looks alone: looking may put a half-swapped folder in order
        if ranks.is_first:
            extra = _pending(params, epoch, root)
    extra = ranks.gather(extra)[0]
    if extra is None:
        return {"made": 0}
    previous = EpochPaths(root, params.previous(epoch)).policy
    params = params.for_epoch(epoch)
    update = params.update
    with watch.time("load"):
        with ranks.agreed():
            world = open_world(params.world.name, paths.base, params.sampler.truncate_timestep)
            prepare_params(world.model, update.params, params.seed)
            stores = [need(paths, stage, path) for stage, path in _stores(paths).items()]
            groups = StoredGroups(world, *stores)
        if update.execution.checkpointing:
            world.model.enable_gradient_checkpointing()
        distribute(world.model, ranks)
        policy = Policy(world.model, update, params.seed, ranks)
        policy.load(previous)
    samples = sum(groups.sizes)
    shown_samples = samples if ranks.is_first else 0
    with step_bar(f"update {epoch}", shown_samples) as advance, watch.time("model"):

        def on_progress(done: int, total: int, metrics: dict[str, float]) -> None:
            advance(done)
            # the ranks see a signal at different moments, and all have to stop after the same step
            STOP.name = STOP.name or next((name for name in ranks.gather(STOP.name) if name), None)
            with ranks.agreed():
                STOP.check(
                    "before the epoch's policy was written: the steps of this update are lost, what was finished "
                    "before stays; run the same command again to start the update again"
                )

        found = update_epoch(world, policy, groups, update, params.seed, epoch_number(epoch), on_progress)
    metrics = {name: value if math.isfinite(value) else None for name, value in sorted(found.items())}
    with watch.time("store"):
        if ranks.is_first:
            files.write_json(paths.metrics("update"), metrics)
        policy.save(paths.policy, extra)
    shown: dict[str, Any] = {
        name: metrics[name] for name in ("loss", "v_gap", "grad_norm") if name in metrics
    }
    if ranks.size > 1:
        shown["ranks"] = ranks.size
    return {"made": 1, "samples": samples, **shown, "time": watch.rounded()}


def _stores(paths: EpochPaths) -> dict[str, Path]:
    return {"prefix": paths.prefixes, "rollout": paths.rollouts, "advantage": paths.advantages}


def _pending(params: Params, epoch: str, root: Path) -> dict[str, Any] | None:
    """What the epoch's policy has to be made from, or None when it is there already. Raises what a stage lacks."""
    from pipeline.errors import CheckpointError
    from pipeline.updates.checkpoint import read_state

    paths = EpochPaths(root, epoch)
    extra: dict[str, Any] = {"chain": chain(params, epoch, root)}
    if not all(path.exists() for path in _stores(paths).values()) and is_finished(params, epoch, root):
        return None
    stores = {path.stem: need(paths, stage, path) for stage, path in _stores(paths).items()}
    extra["stores"] = {name: store.content_digest() for name, store in stores.items()}
    try:
        if paths.metrics("update").exists() and read_state(paths.policy)["state"]["extra"] == extra:
            return None
    except CheckpointError:
        pass  # none yet, or damaged: it is made again from the previous one
    return extra


def command(
    epoch: o.Epoch,
    root: o.Root = o.ARTIFACTS,
    params: o.ParamsFile = o.PARAMS,
    set_: o.Set = None,
    json: o.Json = False,
) -> None:
    """Train the policy for one epoch on the selected candidates.

    Example: wcpipe update --epoch e001
    Example: torchrun --nproc-per-node 8 -m stages.cli update --epoch e001
    """
    from pipeline.errors import ConfigError
    from pipeline.updates.environment import EndedElsewhere, place

    rank = place().rank
    try:
        summary = run_update(load_params(params, set_), epoch, root)
    except (EndedElsewhere, ConfigError) as error:
        if rank == 0 and isinstance(error, ConfigError):
            raise
        raise typer.Exit(
            error.exit_code
        ) from None  # said by one rank already, or by rank 0 in the same words
    if rank == 0:
        report(summary, json)
