"""`wcpipe run`: all stages of many epochs in one process.

The same functions as the commands, so data still passes through disk only and any epoch can be looked at, resumed or
redone with the single commands; what is saved is the start of five processes an epoch. Long runs fill disks: `--keep`
thins out epochs that nothing depends on any more; their ema weights and metrics stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stages import options as o
from stages.common import EpochPaths, load_params, report

if TYPE_CHECKING:
    from pipeline.config import Params


def parse_keep(text: str) -> int | None:
    """`all` -> None; `last:2` -> 2. Raises UsageError."""
    from pipeline.errors import UsageError

    kind, _, count = text.partition(":")
    if text == "all":
        return None
    if kind == "last" and count.isdigit() and int(count) >= 1:
        return int(count)
    raise UsageError(f"--keep {text}: write all or last:N with N of 1 or more")


def prune(root: Path, prev: Mapping[str, str], finished: Sequence[str], keep: int) -> list[str]:
    """Thin out all but the last `keep` of the `finished` epochs; returns the epochs that lost something.

    Their stores go, and of their policies all but the ema weights and state.json: such an epoch can be evaluated and is
    known to be finished, but no longer trained on from. So one that an unfinished epoch of `prev` (epoch -> the epoch
    it starts from) still needs is untouched, like the unfinished ones. A policy from former parameters does not make
    an epoch finished: it will be made again.
    """
    from pipeline import files
    from pipeline.updates.checkpoint import STATE

    needed = {start for epoch, start in prev.items() if epoch not in finished}
    pruned = []
    for epoch in finished[:-keep]:
        if epoch in needed:
            continue
        paths = EpochPaths(root, epoch)
        doomed = [paths.prefixes, paths.rollouts, paths.folder / "scores.zarr", paths.advantages]
        doomed += [path for path in paths.policy.iterdir() if path.name not in (STATE, "ema.safetensors")]
        present = [path for path in doomed if path.exists()]
        for path in present:
            files.remove(path)
        if present:
            pruned.append(epoch)
    return pruned


def refuse_thinned(root: Path, epoch: str, start: str) -> None:
    """Raise CheckpointError where the policy that an unfinished epoch starts from was thinned out by `prune`."""
    from pipeline.errors import CheckpointError
    from pipeline.updates.checkpoint import STATE

    policy = EpochPaths(root, start).policy
    if (policy / STATE).exists() and not (policy / "old.safetensors").exists():
        raise CheckpointError(
            f"{policy / 'old.safetensors'}: is missing: --keep thinned it out, and now {epoch} must be made (again) "
            f"from it, because it is gone or parameters changed; use another --root, or delete {root}/e001 and all "
            "later epochs to make them again"
        )


def run_epochs(params: Params, root: Path, keep: int | None = None, as_json: bool = False) -> dict[str, Any]:
    """Run every epoch of `params.epochs` in order; finished ones are passed over. Prints one line a stage."""
    from pipeline.stores import Shard
    from stages.advantage import run_advantage
    from stages.base import run_base
    from stages.prefix import run_prefix
    from stages.rollout import run_rollout
    from stages.score import run_score
    from stages.update import is_finished, run_update

    report(run_base(params, root), as_json)
    done = 0
    epochs = sorted(params.epochs, key=lambda epoch: int(epoch[1:]))
    prev = {epoch: params.previous(epoch) for epoch in epochs}
    for number, epoch in enumerate(epochs, 1):
        if is_finished(params, epoch, root):
            continue
        refuse_thinned(root, epoch, prev[epoch])
        for stage in (run_prefix, run_rollout, run_score):
            report(stage(params, epoch, root, Shard()), as_json)
        report(run_advantage(params, epoch, root), as_json)
        report(run_update(params, epoch, root), as_json)
        done += 1
        if keep is not None:
            prune(root, prev, epochs[:number], keep)
    return {"stage": "run", "epochs": len(epochs), "made": done}


def command(
    epochs: Annotated[
        int | None,
        typer.Option(min=1, help="Run e001 to this one instead of the file's epochs.", show_default=False),
    ] = None,
    root: o.Root = o.ARTIFACTS,
    params: o.ParamsFile = o.PARAMS,
    keep: Annotated[str, typer.Option(help="What to keep: all, or last:N finished epochs in full.")] = "all",
    set_: o.Set = None,
    json: o.Json = False,
) -> None:
    """Run all stages of many epochs in one process; started again it goes on where it stopped.

    Example: wcpipe run --epochs 60 --root runs/long --keep last:2 --set update.lr=1e-4
    """
    from pipeline.config import Params, epoch_chain

    loaded = load_params(params, set_)
    if epochs is not None:
        data = loaded.written() | {"epochs": epoch_chain(epochs, loaded.epochs)}
        loaded = Params.model_validate_strict(data, str(params))
    report(run_epochs(loaded, root, parse_keep(keep), json), json)
