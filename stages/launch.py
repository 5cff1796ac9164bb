"""`launcher: local | slurm`: the same command runs here or as an array job, and its caller cannot tell the difference.

WHY here and not in dvc.yaml: DVC (or a person) starts `wcpipe rollout --epoch e001` and waits for its exit code and its
store. With `launcher: slurm` in conf/cluster.yaml the command submits itself as an array, waits, and ends as the stage
would have. So dvc.yaml names no cluster. Tasks (WCPIPE_LAUNCHER=local), parts (--shard) and ranks never submit.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.cluster.config import ClusterConfig
    from pipeline.config import Params
    from stages.jobs import JobFolder, JobRecord


def launchable(stage: str, command: Callable[..., None]) -> Callable[..., None]:
    """The Typer command `command` of `stage`, sent to SLURM where conf/cluster.yaml says so."""

    @functools.wraps(command)
    def wrapped(**options: Any) -> None:
        from pipeline.cluster.config import load_cluster

        config = load_cluster()
        whole = options.get("shard", "1/1") == "1/1" and "WORLD_SIZE" not in os.environ  # no part, no rank
        if whole and config.launches(stage):
            run_on_cluster(stage, options, sys.argv[1:], config)
        else:
            command(**options)

    return wrapped


def run_on_cluster(
    stage: str, options: dict[str, Any], arguments: Sequence[str], config: ClusterConfig
) -> None:
    """Submit the command, wait for all its tasks, and close its stores. Prints the stage's summary."""
    from stages.common import log_run, report
    from stages.follow import Follower, finish
    from stages.jobs import JobFolder

    start, root = time.perf_counter(), Path(options["root"])
    epoch = options.get("epoch") or options.get("control") or "e000"
    folder = JobFolder(root, str(epoch), stage)
    params = Path(options["params"]) if "params" in options else None
    follower = Follower(folder, config)
    for _ in range(config.retries + 1):
        record = prepare(
            folder, stage, str(epoch), ["wcpipe", *arguments], params, options.get("set_"), config
        )
        record = follower.wait(follower.attach_or_submit(record))
        missing = close(stage, root, str(epoch))
        if not missing:
            break
        print(f"wcpipe: {stage} {epoch}: {missing} groups are still missing; once more", file=sys.stderr)
        finish(folder, record)
    else:
        from pipeline.errors import DataError

        raise DataError(
            f"{stage} {epoch}: {missing} groups are missing after {config.retries + 1} submissions; "
            f"run `wcpipe verify --repair {root}/{epoch}`, then this again"
        )
    finish(folder, record)
    summary = {
        "stage": stage,
        "epoch": epoch,
        "launcher": "slurm",
        "jobs": record.ids,
        "tasks": record.tasks,
        "restarts": sum(folder.task(task).get("restarts", 0) for task in record.all_tasks),
        "seconds": round(time.perf_counter() - start, 2),
    }
    log_run(root, str(epoch), stage, summary)
    report(summary, bool(options.get("json")))


def prepare(
    folder: JobFolder,
    stage: str,
    epoch: str,
    command: Sequence[str],
    params: Path | None,
    overrides: Sequence[str] | None,
    config: ClusterConfig,
) -> JobRecord:
    """The record of a submission that may be made: its parameters are read and frozen now. Raises ConfigError.

    Tasks that start hours later use the frozen file, so editing params.yaml cannot make half of an array clear what the
    other half wrote.
    """
    from pipeline import __version__, files
    from pipeline.config import load, read_yaml
    from pipeline.digests import digest_of
    from stages.jobs import JobRecord

    content: Any = None
    tasks, plain = 1, without(command, "--params")
    if params is not None:
        loaded = load(params, overrides or ())
        content = read_yaml(params)
        tasks = parts(stage, epoch, loaded, config)
    record = JobRecord(
        stage, epoch, list(plain), digest_of([__version__, list(plain), content, tasks]), tasks
    )
    if params is not None:
        frozen = folder.path.resolve() / f"params.{record.fingerprint[:8]}.yaml"
        files.write_bytes(frozen, params.read_bytes())
        record.command += ["--params", str(frozen)]
    return record


def parts(stage: str, epoch: str, params: Params, config: ClusterConfig) -> int:
    """How many tasks the stage is cut into: at most one a zarr shard."""
    from pipeline.cluster.config import SHARDED

    if stage not in SHARDED:
        return 1
    from pipeline.stores import block_size

    groups = params.for_epoch(epoch).prefix.groups
    return config.tasks(stage, groups, block_size(groups))


def without(command: Sequence[str], option: str) -> list[str]:
    """`command` without `option VALUE` and `option=VALUE`."""
    kept: list[str] = []
    skip = False
    for word in command:
        if skip or word == option:
            skip = not skip
        elif not word.startswith(f"{option}="):
            kept.append(word)
    return kept


def close(stage: str, root: Path, epoch: str) -> int:
    """What the last task of a local run does, once all tasks are done: sweep, write metrics. Returns missing groups.

    The tasks did it too, but on a shared file system the last one may not have seen the others' last groups.
    """
    from pipeline.cluster.config import SHARDED
    from pipeline.errors import DataError
    from pipeline.stores import GroupStore, Shard
    from stages import prefix
    from stages.common import EpochPaths, Stopwatch

    if stage not in SHARDED:
        return 0
    paths = EpochPaths(root, epoch)
    named = {"prefix": [paths.prefixes], "rollout": [paths.rollouts]}
    places = named.get(stage) or [place.parent for place in sorted(paths.scores("").glob("*/zarr.json"))]
    missing = 0
    for place in places:
        try:
            store = GroupStore.open(place)
            missing += len(store.pending())
            if stage == "score":
                store.sweep()
            else:
                prefix.finish(store, Shard(), paths.metrics(stage), 0, Stopwatch())
        except DataError:
            missing += 1
    return missing
