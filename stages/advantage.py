"""`wcpipe advantage`: rewards from the raw scores, then advantages over the whole epoch, then who is trained.

The only stage that looks at all groups at once (a global standard deviation needs them), and the only one that judges:
changing a threshold, a weight or the selection redoes this stage and the update, and measures nothing again. Rewards
and their details (both accuracies, the chosen threshold, the excursion) are stored beside the advantages.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages import options as o
from stages.common import STOP, EpochPaths, load_params, need, report, staged, track

if TYPE_CHECKING:
    from pipeline.config import Params
    from pipeline.rewards import RewardValues
    from pipeline.stores import GroupStore

CODE = 1  # as in stages.prefix


@staged("advantage")
def run_advantage(params: Params, epoch: str, root: Path) -> dict[str, Any]:
    """Write `advantages.zarr` of one epoch. Raises MissingScoresError when too many scores are missing."""
    import numpy as np

    from pipeline import files, rewards
    from pipeline.advantages import compute_advantages
    from pipeline.rewards.group import read_context, read_raw
    from pipeline.stores import ArraySpec, GroupStore

    paths = EpochPaths(root, epoch)
    progress = params.progress(epoch)
    params = params.for_epoch(epoch)
    names = list(params.advantage.weights)
    configs = {name: rewards.settings(name, params.rewards) for name in names}
    scorers = rewards.needs(names)
    prefixes = need(paths, "prefix", paths.prefixes)
    scores = {name: need(paths, "score", paths.scores(name)) for name in scorers}
    inputs = {
        "stage": "advantage",
        "code": CODE,
        "params": params.dump("rewards", "advantage"),
        "rewards": {name: rewards.find(name).version for name in names},
        "prefixes": prefixes.content_digest(),
        "scores": {name: scores[name].content_digest() for name in scorers},
        **warming(params, progress),
    }
    allowed = params.score.missing_share
    if (done := _finished(paths, inputs)) is not None:
        records = [done.record(index) for index in range(len(done))]
        candidates = done.specs["r"].shape[0] * len(done)
        for name in names:
            missing = [reason for record in records for reason in record["reasons"][name].values()]
            _refuse_missing(name, missing, candidates, allowed, epoch)
        return _summary(files.read_json(paths.metrics("advantage"), ""), names, len(done), 0)

    values: dict[str, list[RewardValues]] = {name: [] for name in names}
    for index in range(len(prefixes)):
        raw = {scorer: read_raw(store, index) for scorer, store in scores.items()}
        context = read_context(prefixes, index, raw, progress)
        for name in names:
            values[name].append(rewards.find(name).compute(raw, context, configs[name]))
        STOP.check("before the advantages were written; run the same command again")
    for name, column in values.items():
        all_reasons = [reason for value in column for reason in value.reasons]
        missing = [reason for reason in all_reasons if reason is not None]
        _refuse_missing(name, missing, len(all_reasons), allowed, epoch)
    found = compute_advantages(
        {name: np.stack([value.value_G for value in column]) for name, column in values.items()},
        params.advantage,
    )

    candidates = found.r_PG.shape[1]
    arrays = [ArraySpec(name, (candidates,), "float64") for name in ("fused", "advantage", "r")]
    arrays += [ArraySpec("selected", (candidates,), "bool"), ArraySpec("order", (candidates,), "int64")]
    for name in names:
        arrays += [ArraySpec(f"{kind}.{name}", (candidates,), "float64") for kind in ("reward", "advantage")]
        arrays += [
            ArraySpec(f"detail.{name}.{detail}", array.shape, str(array.dtype))
            for detail, array in sorted(values[name][0].details.items())
        ]
    store = GroupStore.prepare(
        paths.advantages,
        kind="advantages",
        arrays=arrays,
        keys=prefixes.keys,
        inputs=inputs,
        block=len(prefixes),  # one process writes them all at once: a file an array
    )
    pending = store.pending()
    for index in track(pending, f"advantage {epoch}", len(pending)):
        chosen = found.selections[index].indices
        order = np.full(candidates, -1, np.int64)
        order[: len(chosen)] = chosen
        group = {
            "fused": found.fused_PG[index],
            "advantage": found.advantage_PG[index],
            "r": found.r_PG[index],
            "selected": np.isin(np.arange(candidates), chosen),
            "order": order,
        }
        for name in names:
            group[f"reward.{name}"] = values[name][index].value_G
            group[f"advantage.{name}"] = found.rewards[name].advantage_PG[index]
            group |= {f"detail.{name}.{key}": array for key, array in values[name][index].details.items()}
        reasons = {
            name: {
                str(g): reason for g, reason in enumerate(values[name][index].reasons) if reason is not None
            }
            for name in names
        }
        store.write(index, group, {"trained": bool(found.trained_P[index]), "reasons": reasons})
    store.sweep()
    metrics = {name: value if math.isfinite(value) else None for name, value in sorted(found.metrics.items())}
    files.write_json(paths.metrics("advantage"), metrics)
    return _summary(metrics, names, len(store), len(pending))


def _finished(paths: EpochPaths, inputs: dict[str, Any]) -> GroupStore | None:
    """The store, if it is finished and of these inputs and its metrics are there: then nothing is computed again.

    Computing could only give other numbers than those that were trained on, with code that nobody gave a version.
    """
    from pipeline.digests import input_changes
    from pipeline.errors import DataError
    from pipeline.stores import GroupStore

    try:
        store = GroupStore.open(paths.advantages).require_complete("")
    except DataError:
        return None
    fits = not input_changes(store.about["inputs"], inputs)
    return store if fits and paths.metrics("advantage").exists() else None


def _summary(metrics: dict[str, Any], names: list[str], groups: int, made: int) -> dict[str, Any]:
    shown = {name: metrics[f"{name}/mean"] for name in names}
    return {"groups": groups, "made": made, **shown, "selected": int(metrics["selected"])}


def warming(params: Params, progress: float) -> dict[str, Any]:
    """Which rewards still wait for their warm-up to end, as an input: {} for parameters without one.

    The bare share is no input: a run that is made longer keeps what it has, unless a warm-up ends elsewhere now.
    """
    from pipeline import rewards

    if not {"temporal", "cycle"} & params.advantage.weights.keys():
        return {}
    config = rewards.settings("temporal", params.rewards).model_dump()
    return {"warming": ["temporal"] if progress < config["temporal_warmup"] else []}


def _refuse_missing(name: str, missing: list[str], values: int, allowed: float, epoch: str) -> None:
    from pipeline.errors import MissingScoresError
    from pipeline.rewards import ABSENT

    missing = [reason for reason in missing if not reason.startswith(ABSENT)]
    if len(missing) > allowed * values:
        raise MissingScoresError(
            f"{epoch}: {len(missing)} of {values} values of {name} are missing, more than "
            f"score.missing_share = {allowed:g} (first reason: {missing[0]}); "
            f"run `wcpipe score --epoch {epoch} --retry-missing`"
        )


def command(
    epoch: o.Epoch,
    root: o.Root = o.ARTIFACTS,
    params: o.ParamsFile = o.PARAMS,
    set_: o.Set = None,
    json: o.Json = False,
) -> None:
    """Compute rewards and advantages of an epoch and select the candidates that are trained.

    Example: wcpipe advantage --epoch e001 --set advantage.best_of_n=6
    """
    report(run_advantage(load_params(params, set_), epoch, root), json)
