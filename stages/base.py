"""`wcpipe base`: put the base into `artifacts/base` and its weights into `artifacts/e000/policy`, the first policy.

Shipped weights are copied; with `world.base: pretrain` the base is trained beside it, resumably, and copied then. Both
give the same layout, and from here on nothing knows the difference but the digest that every result carries.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages import options as o
from stages.common import EpochPaths, load_params, report, staged

if TYPE_CHECKING:
    from pipeline.config import Params

log = logging.getLogger("wcpipe.base")

CODE = 1  # as in stages.prefix


@staged("base")
def _run(params: Params, epoch: str, root: Path) -> dict[str, Any]:
    from pipeline.digests import SHORT
    from pipeline.errors import CheckpointError
    from pipeline.updates.checkpoint import read_state
    from pipeline.updates.policy import Policy, prepare_params
    from pipeline.worlds.registry import base_digest, copy_base, open_world

    paths = EpochPaths(root, epoch)
    source = Path(params.world.weights)
    if params.world.base == "pretrain":
        from stages.pretrain import run_pretrain

        source = paths.pretrained
        run_pretrain(
            params.pretrain, source, "world", workers=1, compiled=False
        )  # goes on, or is done already
    if not _same(source, paths.base):
        copy_base(params.world.name, source, paths.base)
    digest = base_digest(paths.base)
    inputs = {"stage": "base", "code": CODE, "base": digest, "params": _trained(params)}
    warn_of_sampler(params, paths.base)
    summary = {"base": digest[:SHORT], "source": params.world.base}
    try:
        if read_state(paths.policy)["state"]["extra"].get("inputs") == inputs:
            return summary | {"made": 0}
    except CheckpointError:
        pass  # there is none yet, or it is damaged: it is made from the base in a second
    world = open_world(params.world.name, paths.base)
    prepare_params(world.model, params.update.params, params.seed)
    Policy(world.model, params.update, params.seed).save(paths.policy, {"inputs": inputs})
    return summary | {"made": 1}


def warn_of_sampler(params: Params, base: Path) -> None:
    """Say loudly what of the sampler makes NFT's samples poor (few-step students, guidance)."""
    from pipeline.sampler import sampler_warnings
    from pipeline.worlds.registry import checkpoint_of

    for line in sampler_warnings(params.sampler, checkpoint_of(params.world.name, base)):
        log.warning("%s", line)


def _same(source: Path, folder: Path) -> bool:
    from pipeline.errors import CheckpointError
    from pipeline.worlds.registry import base_digest

    try:
        return base_digest(folder) == base_digest(source)
    except CheckpointError:  # one of them is not there: copying says which
        return False


def _trained(params: Params) -> dict[str, Any]:
    return {"seed": params.seed, "update.params": params.update.params.model_dump(mode="json")}


def run_base(params: Params, root: Path) -> dict[str, Any]:
    """Make `base/` and `e000/policy` under `root`, unless they are there already and fit."""
    from pipeline.config import BASE_EPOCH

    return _run(params, BASE_EPOCH, root)


def command(
    root: o.Root = o.ARTIFACTS, params: o.ParamsFile = o.PARAMS, set_: o.Set = None, json: o.Json = False
) -> None:
    """Put the base world model and the first policy in place.

    Example: wcpipe base
    Example: wcpipe base --set world.base=pretrain --set pretrain.steps=2000
    """
    report(run_base(load_params(params, set_), root), json)
