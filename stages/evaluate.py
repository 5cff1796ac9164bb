"""`wcpipe evaluate`: basic and compound action accuracy of one policy on held-out rooms.

The result is one JSON file of rows, one a case, beside the parameters that made it; `wcpipe report` compares files.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stages import options as o
from stages.common import STOP, EpochPaths, load_params, need_policy, open_weights, report, staged, step_bar

if TYPE_CHECKING:
    from pipeline.benchmark.config import AccuracyConfig
    from pipeline.config import Params
    from pipeline.scorers.critic import CriticScorer
    from pipeline.scorers.pose_net import PoseScorer

    OnCase = Callable[[int, int], None]
    Judge = Callable[[PoseScorer, CriticScorer, OnCase], list[dict[str, Any]]]

log = logging.getLogger("wcpipe.evaluate")

CODE = 4  # as in stages.prefix; 2: the oracle differentiates centrally; 3: judged in chunks; 4: it moves as keys can


def result_path(root: Path, name: str) -> Path:
    """Where the rows of an evaluation lie: `name` is an epoch, a control, or what `result_name` made of one."""
    return root / "evaluation" / f"{name}.json"


def result_name(subject: str, config: AccuracyConfig) -> str:
    """Name of an evaluation: `e008`, and `e008-rl-live` where rooms or weights are not those that are compared.

    Other sizes or seeds replace the file: they are the same measurement, made again.
    """
    usual = type(config)()
    parts = [
        getattr(config, key) for key in ("split", "weights") if getattr(config, key) != getattr(usual, key)
    ]
    return "-".join([subject, *parts])


@staged("evaluate")
def run_evaluate(params: Params, epoch: str, root: Path, name: str | None = None) -> dict[str, Any]:
    """Write `evaluation/<name>.json` for the policy of `epoch` (e000: the base), unless it is there already."""
    from pipeline.benchmark.action_accuracy import evaluate_policy
    from pipeline.errors import ConfigError
    from pipeline.updates.checkpoint import read_state
    from pipeline.worlds.registry import base_digest

    if params.world.name != "mini":
        raise ConfigError(
            f"world.name is {params.world.name}: evaluation compares with the true state, which only the mini world "
            "has; look at artifacts/<epoch>/metrics and at the rollouts' frames"
        )
    paths, config = EpochPaths(root, epoch), params.evaluate
    need_policy(paths)
    inputs = {
        "base": base_digest(paths.base),
        "policy": read_state(paths.policy)["files"][f"{config.weights}.safetensors"],
        "params": params.dump("sampler", "evaluate"),
    }

    def judge(pose: PoseScorer, critic: CriticScorer, on_case: OnCase) -> list[dict[str, Any]]:
        world = open_weights(params, paths.base, paths.policy, config.weights)
        steps, shift = params.sampler.steps, params.sampler.shift
        return evaluate_policy(world, pose, critic, config, steps, shift, on_case)

    return _evaluate(params, result_path(root, name or result_name(epoch, config)), inputs, judge)


@staged("evaluate")
def run_control(params: Params, control: str, root: Path, name: str | None = None) -> dict[str, Any]:
    """Write `evaluation/control-<...>.json`: videos that stand still or are true renders, judged like a policy's."""
    from pipeline.benchmark.action_accuracy import CONTROLS, evaluate_control
    from pipeline.errors import UsageError

    kind = control.removeprefix("control-")
    if kind not in CONTROLS:
        raise UsageError(f"--control {kind}: choose {' or '.join(CONTROLS)}")
    # no policy takes part, so its weights are no part of the name or of the inputs
    config = params.evaluate.model_copy(update={"weights": type(params.evaluate)().weights})
    inputs = {"control": kind, "params": {"evaluate": config.model_dump(mode="json", exclude={"weights"})}}

    def judge(pose: PoseScorer, critic: CriticScorer, on_case: OnCase) -> list[dict[str, Any]]:
        return evaluate_control(kind, pose, critic, config, on_case)

    return _evaluate(params, result_path(root, name or result_name(f"control-{kind}", config)), inputs, judge)


def _evaluate(params: Params, path: Path, inputs: dict[str, Any], judge: Judge) -> dict[str, Any]:
    """The rows at `path` if they were made from `inputs`; otherwise those of `judge`, written there."""
    from pipeline import files
    from pipeline.digests import input_changes
    from pipeline.errors import DataError
    from pipeline.scorers.critic import CriticScorer
    from pipeline.scorers.pose_net import PoseScorer
    from pipeline.scorers.registry import engine_digest

    folder = Path(params.score.weights)
    scorers = [engine_digest(name, folder) for name in ("pose", "critic")]
    inputs = {"stage": "evaluate", "code": CODE, "scorers": scorers, **inputs}
    try:
        done = files.read_json(path, "")
        changes = input_changes(done["inputs"], inputs)
        if not changes:
            return summarise(done["rows"]) | {"made": 0}
        log.warning("%s: was made from other inputs (%s): it is replaced", path, "; ".join(changes[:3]))
    except (DataError, KeyError, TypeError, AttributeError):
        pass  # there is none yet, or it is damaged: it is made
    with step_bar(f"evaluate {path.stem}", params.evaluate.basic + params.evaluate.compound) as advance:

        def on_case(done: int, total: int) -> None:
            advance(done)
            STOP.check("before the end: the cases so far are lost; run the same command again to start over")

        rows = judge(PoseScorer.load(folder), CriticScorer.load(folder), on_case)
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
    epoch: Annotated[
        str,
        typer.Option(
            "--epoch", "-e", help="Epoch whose policy is judged; e000 is the base.", show_default=False
        ),
    ] = "",
    control: Annotated[
        str,
        typer.Option(
            help="Judge no policy but a control: static, render (cyclebench: more).", show_default=False
        ),
    ] = "",
    suite: Annotated[
        str, typer.Option(help="actions: one action held; cyclebench: words that close.")
    ] = "actions",
    root: o.Root = o.ARTIFACTS,
    params: o.ParamsFile = o.PARAMS,
    name: Annotated[
        str | None,
        typer.Option(
            help="Name of the result below evaluation/; else the epoch, with split and weights unless the usual ones.",
            show_default=False,
        ),
    ] = None,
    set_: o.Set = None,
    json: o.Json = False,
) -> None:
    """Judge one policy on held-out rooms: action accuracy by the pose scorer and by the oracle, and visual quality.

    A control says what a video that stands still (floor) or a true render (ceiling) gets on the same cases.

    Example: wcpipe evaluate --epoch e008
    Example: wcpipe evaluate --control static
    Example: wcpipe evaluate --suite cyclebench --epoch e000
    """
    from pipeline.errors import UsageError
    from stages.cyclebench import run_cycle_control, run_cyclebench

    if suite not in ("actions", "cyclebench"):
        raise UsageError(f"--suite {suite}: there are actions and cyclebench")

    if bool(epoch) == bool(control):
        raise UsageError(
            "evaluate needs either --epoch or --control; for example `wcpipe evaluate --epoch e008`"
        )
    loaded = load_params(params, set_)
    if control:
        on_control = run_control if suite == "actions" else run_cycle_control
        report(on_control(loaded, f"control-{control}", root, name), json)
    else:
        on_policy = run_evaluate if suite == "actions" else run_cyclebench
        report(on_policy(loaded, epoch, root, name), json)
