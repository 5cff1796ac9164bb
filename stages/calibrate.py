"""`wcpipe calibrate`: measure alpha of the closure rewards on the base, and write it into parameter files.

alpha is a number in params.yaml like any other, so it is part of every digest and nothing recomputes it behind anyone's
back. A new base needs a new one: run the command again.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stages import options as o
from stages.common import STOP, EpochPaths, load_params, need_policy, open_weights, report, staged, step_bar

if TYPE_CHECKING:
    from pipeline.config import Params


@staged("calibrate")
def run_calibrate(params: Params, epoch: str, root: Path, prompts: int) -> dict[str, Any]:
    """Write `evaluation/calibration.json` for the policy of `epoch` (the base); returns what it holds."""
    from pipeline import files, rewards
    from pipeline.benchmark.calibration import base_distances, calibration
    from pipeline.rewards.closure import DiscrepancyConfig
    from pipeline.scorers.choice import choose
    from pipeline.scorers.tracks import TracksEngine
    from pipeline.worlds.registry import policy_digest

    paths = EpochPaths(root, epoch)
    policy = need_policy(paths)
    config = rewards.settings("spatial", params.rewards)
    assert isinstance(config, DiscrepancyConfig)
    world = open_weights(params, paths.base, policy, "old")
    engine = choose("tracks", params).open()
    assert isinstance(engine, TracksEngine)
    with step_bar("calibrate", prompts) as advance:

        def on_prompt(done: int, total: int) -> None:
            advance(done)
            STOP.check("before the end: nothing was written; run the same command again")

        found = calibration(base_distances(world, params, config, engine.tracker, prompts, on_prompt))
    inputs = {
        "policy": policy_digest(paths.base, policy),
        "params": params.dump("seed", "words", "sampler", "cycle", "rewards"),
        "tracker": engine.tracker.name,
    }
    files.write_json(root / "evaluation" / "calibration.json", found | {"inputs": inputs})
    return found


def write_alpha(path: Path, alpha: float) -> None:
    """Set `rewards.closure.alpha` in a parameter file; comments and order stay. Raises ConfigError, StorageError."""
    import io

    from ruamel.yaml import YAML
    from ruamel.yaml.comments import CommentedMap

    from pipeline import files
    from pipeline.config import read_yaml

    read_yaml(path)  # says what is wrong with the file, if anything
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 200
    data = yaml.load(path.read_text(encoding="utf-8"))
    section = data
    for key in ("rewards", "closure"):
        if not isinstance(section.get(key), dict):
            section[key] = CommentedMap()
        section = section[key]
    section["alpha"] = alpha
    text = io.StringIO()
    yaml.dump(data, text)
    files.write_bytes(path, text.getvalue().encode())


def command(
    epoch: Annotated[
        str, typer.Option("--epoch", "-e", help="Policy that is measured; e000 is the base.")
    ] = "e000",
    prompts: Annotated[int, typer.Option(min=1, help="Cycles that are sampled.")] = 16,
    write: Annotated[
        list[Path] | None,
        typer.Option(help="Parameter files that get rewards.closure.alpha; repeatable.", show_default=False),
    ] = None,
    root: o.Root = o.ARTIFACTS,
    params: o.ParamsFile = o.PARAMS,
    set_: o.Set = None,
    json: o.Json = False,
) -> None:
    """Measure alpha of the closure rewards on the base: ln 2 / median distance of mirrored frames.

    Example: wcpipe calibrate --params experiments/cycle-both.yaml --write experiments/cycle-both.yaml
    """
    # a file whose rewards need alpha cannot be read before it has one
    loaded = load_params(params, ["rewards.closure.alpha=1.0", *(set_ or ())])
    found = run_calibrate(loaded, epoch, root, prompts)
    for path in write or ():
        write_alpha(path, found["alpha"])
    report(found, json)
