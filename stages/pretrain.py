"""`wcpipe pretrain`: train the mini world's base, its pose scorer or its critic, from nothing.

Not part of `dvc repro`: the repository ships what these commands made (weights/mini, with the parameters beside it).
The folder is never `artifacts/base`: that is `wcpipe base`'s, which replaces what lies there.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stages import options as o
from stages.common import STOP, load_params, step_bar

if TYPE_CHECKING:
    from pipeline.worlds.mini.config import PretrainConfig


def run_pretrain(
    settings: PretrainConfig, folder: Path, part: str, workers: int, compiled: bool
) -> dict[str, Any]:
    """Train one part into `folder`; a started training goes on from its last checkpoint, a finished one is left."""
    from pipeline.errors import UsageError
    from pipeline.scorers.train import TrainOptions
    from pipeline.worlds.mini import pretrain, pretrain_scorers

    def stop(every: int) -> None:
        STOP.check(
            f"before the end: the steps since the last checkpoint (one each {every} steps) are lost; "
            "run the same command again to go on from there"
        )

    if part == "world":
        losses: list[float] = []
        with step_bar("pretrain world", settings.steps) as advance:

            def on_step(step: int, loss: float) -> None:
                losses.append(loss)
                advance(step + 1)
                stop(settings.save_every)

            pretrain.pretrain(settings, folder, on_step, workers, compiled)
        summary = {"stage": "pretrain", "part": part, "steps": settings.steps, "made": len(losses)}
        return summary | ({"loss": sum(losses[-50:]) / len(losses[-50:])} if losses else {})
    if part in ("pose", "critic"):
        with step_bar(f"pretrain {part}", pretrain_scorers.STEPS[part]) as advance:

            def on_scorer_step(step: int, loss: float) -> None:
                advance(step + 1)
                stop(TrainOptions.checkpoint_every)

            trained = pretrain_scorers.train(part, folder, on_scorer_step)
        return {"stage": "pretrain", "part": part, **trained}
    raise UsageError(f"--part {part}: choose world, pose or critic")


def command(
    folder: Annotated[Path, typer.Option(help="Where weights, state and the loss curve go.")] = Path(
        "artifacts/pretrain"
    ),
    part: Annotated[str, typer.Option(help="world, pose or critic.")] = "world",
    params: o.ParamsFile = o.PARAMS,
    workers: Annotated[int, typer.Option(min=0, help="Processes that render ahead (world).")] = 1,
    compiled: Annotated[bool, typer.Option("--compile", help="Use torch.compile (world).")] = False,
    set_: o.Set = None,
    json: o.Json = False,
) -> None:
    """Train the mini world's base or one of its scorers; resumable, deterministic for a seed.

    Example: wcpipe pretrain --part world --folder runs/base --set pretrain.steps=5000
    """
    from stages.common import report

    report(run_pretrain(load_params(params, set_).pretrain, folder, part, workers, compiled), json)
