"""`wcpipe evaluate`: basic and compound action accuracy of one policy on held-out rooms.

The result is one JSON file of rows, one a case, beside the parameters that made it; `wcpipe report` compares files.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages import options as o
from stages.common import EpochPaths, load_params, report, staged, step_bar

if TYPE_CHECKING:
    from pipeline.config import Params

CODE = 2  # as in stages.prefix; 2: the oracle differentiates centrally


def result_path(root: Path, epoch: str) -> Path:
    """Where the rows of an epoch's policy lie."""
    return root / "evaluation" / f"{epoch}.json"


@staged("evaluate")
def run_evaluate(params: Params, epoch: str, root: Path) -> dict[str, Any]:
    """Write `evaluation/<epoch>.json` for the policy of `epoch` (e000: the base), unless it is there already."""
    from pipeline import files
    from pipeline.benchmark.action_accuracy import evaluate_policy
    from pipeline.errors import DataError
    from pipeline.scorers.critic import CriticScorer
    from pipeline.scorers.pose_net import PoseScorer
    from pipeline.scorers.registry import engine_digest
    from pipeline.updates.checkpoint import read_state
    from pipeline.worlds.registry import base_digest, open_policy

    paths, config = EpochPaths(root, epoch), params.evaluate
    folder = Path(params.score.weights)
    inputs = {
        "stage": "evaluate",
        "code": CODE,
        "base": base_digest(paths.base),
        "policy": read_state(paths.policy)["files"][f"{config.weights}.safetensors"],
        "scorers": [engine_digest(name, folder) for name in ("pose", "critic")],
        "params": params.dump("seed", "sampler", "evaluate"),
    }
    path = result_path(root, epoch)
    try:
        done = files.read_json(path, "")
        if done.get("inputs") == inputs:
            return summarise(done["rows"]) | {"made": 0}
    except DataError:
        pass  # there is none yet, or it is damaged: it is made
    world = open_policy(
        params.world.name, paths.base, paths.policy, config.weights, params.update, params.seed
    )
    with step_bar(f"evaluate {epoch}", config.basic + config.compound) as advance:
        rows = evaluate_policy(
            world,
            PoseScorer.load(folder),
            CriticScorer.load(folder),
            config,
            params.sampler.steps,
            params.sampler.shift,
            lambda done, total: advance(done),
        )
    files.write_json(path, {"inputs": inputs, "rows": rows})
    return summarise(rows) | {"made": len(rows)}


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Means by kind, for the one-line summary."""
    import numpy as np

    names = ("oracle_joint", "scorer_joint", "quality", "psnr", "oracle_failed")
    return {
        kind: {
            name: round(float(np.mean([row[name] for row in rows if row["kind"] == kind])), 4)
            for name in names
        }
        for kind in ("basic", "compound")
    }


def command(
    epoch: o.Epoch,
    root: o.Root = o.ARTIFACTS,
    params: o.ParamsFile = o.PARAMS,
    set_: o.Set = None,
    json: o.Json = False,
) -> None:
    """Judge one policy on held-out rooms: action accuracy by the pose scorer and by the oracle, and visual quality.

    Example: wcpipe evaluate --epoch e008
    """
    report(run_evaluate(load_params(params, set_), epoch, root), json)
