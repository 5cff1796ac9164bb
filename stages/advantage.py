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
from stages.common import EpochPaths, load_params, report, staged

if TYPE_CHECKING:
    from pipeline.config import Params
    from pipeline.rewards import RewardValues

CODE = 1  # as in stages.prefix


@staged("advantage")
def run_advantage(params: Params, epoch: str, root: Path) -> dict[str, Any]:
    """Write `advantages.zarr` of one epoch. Raises MissingScoresError when too many scores are missing."""
    import numpy as np

    from pipeline import files, rewards
    from pipeline.advantages import compute_advantages
    from pipeline.errors import ConfigError
    from pipeline.rewards.group import read_context, read_raw
    from pipeline.stores import ArraySpec, GroupStore

    paths = EpochPaths(root, epoch)
    params = params.for_epoch(epoch)
    names = list(params.advantage.weights)
    configs = {name: rewards.settings(name, params.rewards) for name in names}
    scorers = rewards.needs(names)
    if absent := [scorer for scorer in scorers if scorer not in params.score.scorers]:
        raise ConfigError(f"advantage.weights needs the scorer {absent[0]!r}: add it to score.scorers")
    remedy = f"run `wcpipe score --epoch {epoch}`"
    prefixes = GroupStore.open(paths.prefixes, remedy).require_complete(remedy)
    scores = {name: GroupStore.open(paths.scores(name), remedy).require_complete(remedy) for name in scorers}

    values: dict[str, list[RewardValues]] = {name: [] for name in names}
    for index in range(len(prefixes)):
        raw = {scorer: read_raw(store, index) for scorer, store in scores.items()}
        context = read_context(prefixes, index, raw)
        for name in names:
            values[name].append(rewards.find(name).compute(raw, context, configs[name]))
    _refuse_missing(values, params.score.missing_share, epoch)
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
        inputs={
            "stage": "advantage",
            "code": CODE,
            "params": params.dump("rewards", "advantage"),
            "prefixes": prefixes.content_digest(),
            "scores": {name: scores[name].content_digest() for name in scorers},
        },
    )
    pending = store.pending()
    for index in pending:
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
    shown = {name: metrics[f"{name}/mean"] for name in names}
    return {"groups": len(store), "made": len(pending), **shown, "selected": int(found.metrics["selected"])}


def _refuse_missing(values: dict[str, list[RewardValues]], allowed: float, epoch: str) -> None:
    from pipeline.errors import MissingScoresError

    for name, column in values.items():
        reasons = [reason for value in column for reason in value.reasons]
        missing = [reason for reason in reasons if reason is not None]
        if len(missing) > allowed * len(reasons):
            raise MissingScoresError(
                f"{epoch}: {len(missing)} of {len(reasons)} values of {name} are missing, more than "
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
