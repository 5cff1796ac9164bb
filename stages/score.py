"""`wcpipe score`: measure the frames of every candidate with each engine.

Each engine has a store of its own, so that one can be run again, in another process or on another machine, without
the others. What could not be measured is missing with a reason and counts as done; `--retry-missing` measures only
that again.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stages import options as o
from stages.common import STOP, EpochPaths, Stopwatch, load_params, need, parse_shard, report, staged, track

if TYPE_CHECKING:
    from pipeline.config import Params
    from pipeline.scorers.registry import Engine
    from pipeline.stores import GroupStore, Shard

CODE = 1  # as in stages.prefix


@staged("score")
def run_score(
    params: Params, epoch: str, root: Path, shard: Shard, only: str | None = None, retry_missing: bool = False
) -> dict[str, Any]:
    """Write `scores.zarr/<scorer>` of one epoch for each scorer (or `only` one); done groups stay."""
    from pipeline import files
    from pipeline.errors import ConfigError
    from pipeline.scorers.choice import choose

    paths = EpochPaths(root, epoch)
    params = params.for_epoch(epoch)
    names = params.score.scorers
    if only is not None and only not in names:
        raise ConfigError(f"--scorer {only}: params.yaml lists {', '.join(names)} in score.scorers")
    prefixes = need(paths, "prefix", paths.prefixes)
    rollouts = need(paths, "rollout", paths.rollouts)
    files.write_json(paths.scores("zarr.json"), {"zarr_format": 3, "node_type": "group", "attributes": {}})
    summary: dict[str, Any] = {"groups": len(rollouts)}
    for name in names if only is None else [only]:
        watch, choice = Stopwatch(), choose(name, params)
        with watch.time("load"):
            engine = choice.open()
        digest = choice.digest()
        summary[name] = _score(name, engine, digest, prefixes, rollouts, paths, shard, retry_missing, watch)
        choice.release()
    return summary


def _score(
    name: str,
    engine: Engine,
    digest: str,
    prefixes: GroupStore,
    rollouts: GroupStore,
    paths: EpochPaths,
    shard: Shard,
    retry_missing: bool,
    watch: Stopwatch,
) -> dict[str, Any]:
    from pipeline.groups import scored_frames
    from pipeline.plan import first_clip
    from pipeline.scorers.registry import AsksRecord, Measured, measure_group
    from pipeline.scorers.tracks import bound
    from pipeline.stores import GroupStore, block_size

    clip, engine_of = first_clip(prefixes.record(0)), bound(engine, prefixes)
    if isinstance(engine, AsksRecord):
        engine_of = lambda index: engine.for_group(prefixes.record(index))  # noqa: E731
    candidates, new_frames = rollouts.specs["frames"].shape[:2]
    past_frames = prefixes.specs["frames"].shape[0]
    specs = engine_of(0).arrays(candidates, new_frames + (clip > 1), past_frames)
    store = GroupStore.prepare(
        paths.scores(name),
        kind=f"scores/{name}",
        arrays=specs,
        keys=rollouts.keys,
        inputs={
            "stage": "score",
            "code": CODE,
            "scorer": engine.name,
            "engine": digest,
            "rollouts": rollouts.content_digest(),
            "prefixes": prefixes.content_digest(),
        },
        block=block_size(len(rollouts)),
    )
    todo: dict[int, Measured | None] = dict.fromkeys(store.pending(shard))
    if retry_missing:
        for index in shard.part(len(store), store.block):
            if index not in todo and store.record(index)["reasons"]:
                reasons = {int(g): text for g, text in store.record(index)["reasons"].items()}
                todo[index] = Measured({spec.name: store.read(index, spec.name) for spec in specs}, reasons)
    again, made = {index for index, before in todo.items() if before is not None}, 0
    taken = store.take(sorted(todo), STOP.check, again)
    for index in track(taken, f"score {engine.name}", len(todo)):
        with watch.time("store"):
            past_FHW3 = prefixes.read(index, "frames")
            frames = scored_frames(past_FHW3, rollouts.read(index, "frames"), clip)
            unusable = {int(g): text for g, text in rollouts.record(index)["reasons"].items()}
        with watch.time("engine"):
            measured = measure_group(engine_of(index), frames, past_FHW3, unusable, todo[index])
        record = {"reasons": {str(g): text for g, text in sorted(measured.reasons.items())}}
        with watch.time("store"):
            store.write(index, measured.arrays, record)
        made += 1
    if shard.alone or not store.pending():
        store.sweep()
    done = store.done()
    missing = sum(len(store.record(index)["reasons"]) for index in range(len(store)) if done[index])
    first = next(
        (text for i in range(len(store)) if done[i] for text in store.record(i)["reasons"].values()), ""
    )
    summary = {"made": made, "missing": missing, "of": int((done != 0).sum()) * candidates}
    return summary | ({"reason": first} if missing else {}) | {"time": watch.rounded()}


def refuse_missing(summary: dict[str, Any], allowed: float, epoch: str) -> None:
    """Raise MissingScoresError (exit code 9) when more than the share `allowed` of a measurement is missing."""
    from pipeline.errors import MissingScoresError

    for name, found in summary.items():
        if isinstance(found, dict) and found.get("missing", 0) > allowed * found.get("of", 0):
            raise MissingScoresError(
                f"{epoch}: {found['missing']} of {found['of']} scores of {name} are missing (first reason: "
                f"{found['reason']}); the others are stored; run `wcpipe score --epoch {epoch} --retry-missing`"
            )


def command(
    epoch: o.Epoch,
    root: o.Root = o.ARTIFACTS,
    params: o.ParamsFile = o.PARAMS,
    shard: o.ShardText = o.WHOLE,
    scorer: Annotated[str | None, typer.Option(help="Only this scorer.", show_default=False)] = None,
    retry_missing: Annotated[
        bool, typer.Option("--retry-missing", help="Measure again what is missing.")
    ] = False,
    set_: o.Set = None,
    json: o.Json = False,
) -> None:
    """Measure the frames of every candidate: camera motion, visual quality.

    Example: wcpipe score --epoch e001 --scorer pose --retry-missing
    """
    loaded = load_params(params, set_)
    summary = run_score(loaded, epoch, root, parse_shard(shard), scorer, retry_missing)
    report(summary, json)
    refuse_missing(summary, loaded.for_epoch(epoch).score.missing_share, epoch)
