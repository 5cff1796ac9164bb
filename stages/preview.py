"""`wcpipe preview`: look at what was generated, as a PNG grid and an mp4.

Of an epoch: the best and the worst candidates of a group after the past they share. Of two policies: the same case of
the benchmark before and after, with the true view above. Nothing is measured and no store is touched.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stages import options as o
from stages.common import EpochPaths, load_params, need, need_policy, open_weights, report, staged

if TYPE_CHECKING:
    from pipeline.config import Params
    from pipeline.preview import Row


@staged("preview")
def run_group(params: Params, epoch: str, root: Path, group: int, count: int) -> dict[str, Any]:
    """Write the `count` best and worst candidates of a group, by advantage, to `<root>/preview`."""
    import numpy as np

    from pipeline.actions import format_word
    from pipeline.camera import frame_labels
    from pipeline.errors import UsageError
    from pipeline.preview import Row

    paths = EpochPaths(root, epoch)
    prefixes, rollouts = need(paths, "prefix", paths.prefixes), need(paths, "rollout", paths.rollouts)
    advantages = need(paths, "advantage", paths.advantages)
    if not 0 <= group < len(prefixes):
        raise UsageError(f"--group {group}: {epoch} has the groups 0 to {len(prefixes) - 1}")
    record = prefixes.record(group)
    past, new = prefixes.read(group, "frames"), rollouts.read(group, "frames")
    videos = (
        new
        if int(record["target_clip"]) == 1
        else np.concatenate([np.broadcast_to(past, (len(new), *past.shape)), new], axis=1)
    )
    advantage = advantages.read(group, "advantage")
    known = [int(g) for g in np.argsort(-advantage) if np.isfinite(advantage[g])]
    chosen = [*known[:count], *[g for g in known[-count:] if g not in known[:count]]]
    rewards = sorted(name for name in advantages.specs if name.startswith("reward."))
    rows = []
    for g in chosen:
        values = ", ".join(
            f"{name.removeprefix('reward.')} {advantages.read(group, name)[g]:.2f}" for name in rewards
        )
        rows.append(Row(f"candidate {g}: advantage {advantage[g]:+.2f}, {values}", videos[g]))
    labels = frame_labels(prefixes.read(group, "labels"), int(record["stride"]))
    keys = ["", *(format_word([int(label)]).removesuffix("-1") for label in labels[1:])]
    return _write(root, f"{epoch}-group{group}", rows, keys, 4.0) | {"word": record["word"]}


@staged("preview")
def run_case(params: Params, after: str, root: Path, before: str, kind: str, case: int) -> dict[str, Any]:
    """Sample case number `case` of the benchmark with two policies and write them under its true view."""
    from pipeline.actions import format_word
    from pipeline.benchmark.action_accuracy import CONTROLS, generate, make_cases
    from pipeline.errors import UsageError
    from pipeline.preview import Row

    config = params.evaluate
    paths = {name: EpochPaths(root, name) for name in (before, after)}
    policies = {name: need_policy(path) for name, path in paths.items()}
    rows: list[Row] = []
    chosen = None
    for name, policy in policies.items():
        world = open_weights(params, paths[name].base, policy, config.weights)
        cases = [c for c in make_cases(config, world.spec.clip_latents * config.clips) if c.kind == kind]
        if not 0 <= case < len(cases):
            raise UsageError(f"--case {case}: there are the {kind} cases 0 to {len(cases) - 1}")
        chosen = cases[case]
        if not rows:
            rows.append(Row("true view", CONTROLS["render"](chosen)))
        sampler = params.sampler
        video = generate(world, chosen.prompt, config.clips, config.seed, sampler.steps, sampler.shift)
        rows.append(Row(name, video))
    assert chosen is not None
    labels = chosen.prompt.labels_A.tolist()
    keys = ["", *(format_word([label]).removesuffix("-1") for label in labels)]
    name = f"{before}-{after}-{kind}{case}"
    return _write(root, name, rows, keys, 4.0) | {"word": format_word(labels)}


def _write(root: Path, name: str, rows: list[Row], keys: list[str], fps: float) -> dict[str, Any]:
    from pipeline.preview import grid, write_mp4, write_png

    png, mp4 = root / "preview" / f"{name}.png", root / "preview" / f"{name}.mp4"
    write_png(png, grid(rows, keys))
    write_mp4(mp4, rows, keys, fps)
    return {"png": str(png), "mp4": str(mp4)}


def command(
    epoch: Annotated[str, typer.Option("--epoch", "-e", help="Epoch whose candidates are shown.")] = "",
    group: Annotated[int, typer.Option(min=0, help="Group of that epoch.")] = 0,
    count: Annotated[int, typer.Option(min=1, help="How many of the best, and of the worst.")] = 2,
    before: Annotated[str, typer.Option(help="Policy to compare against.")] = "e000",
    after: Annotated[str, typer.Option(help="Policy to compare; sampled on a case of the benchmark.")] = "",
    kind: Annotated[str, typer.Option(help="basic or compound case.")] = "compound",
    case: Annotated[int, typer.Option(min=0, help="Number of the case.")] = 0,
    root: o.Root = o.ARTIFACTS,
    params: o.ParamsFile = o.PARAMS,
    set_: o.Set = None,
    json: o.Json = False,
) -> None:
    """Write a PNG grid and an mp4: best and worst candidates of a group, or one case before and after.

    Example: wcpipe preview --epoch e001 --group 3, or wcpipe preview --before e000 --after e008 --case 5
    """
    from pipeline.errors import UsageError

    if bool(epoch) == bool(after):
        raise UsageError(
            "preview needs either --epoch EPOCH (candidates of a group) or --after EPOCH (a case)"
        )
    if kind not in ("basic", "compound"):
        raise UsageError(f"--kind {kind}: choose basic or compound")
    loaded = load_params(params, set_)
    if epoch:
        report(run_group(loaded, epoch, root, group, count), json)
    else:
        report(run_case(loaded, after, root, before, kind, case), json)
