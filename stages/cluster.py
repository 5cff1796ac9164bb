"""`wcpipe cluster`: stages as SLURM array jobs; submit whole epochs, see how they are, read logs, cancel, go on.

`launcher: slurm` (stages/launch.py) makes any stage command a client that waits. The commands here do not wait:
`submit` queues all stages of one or more epochs at once, each depending on the one before, and returns.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stages import options as o

if TYPE_CHECKING:
    from pipeline.cluster.config import ClusterConfig
    from stages.follow import Follower
    from stages.jobs import JobFolder, JobRecord

app = typer.Typer(help="Run stages as SLURM array jobs (conf/cluster.yaml).", no_args_is_help=True)
ORDER = ("prefix", "rollout", "score", "advantage", "update")
Conf = Annotated[
    Path | None, typer.Option("--conf", help="Instead of conf/cluster.yaml.", show_default=False)
]
OptionalEpoch = Annotated[
    str | None, typer.Option("--epoch", "-e", help="Only this epoch.", show_default=False)
]
OptionalStage = Annotated[str | None, typer.Option("--stage", help="Only this stage.", show_default=False)]


@app.command()
def submit(
    epoch: o.Epoch,
    until: Annotated[
        str | None, typer.Option(help="Last epoch of several to submit.", show_default=False)
    ] = None,
    root: o.Root = o.ARTIFACTS,
    params: o.ParamsFile = o.PARAMS,
    set_: o.Set = None,
    conf: Conf = None,
    dry: Annotated[bool, typer.Option("--dry", help="Print the scripts and submit nothing.")] = False,
) -> None:
    """Queue all stages of one or more epochs, each after the one before, and return at once.

    Called again it submits what failed or is missing and leaves alone what is done or queued.

    Example: wcpipe cluster submit --epoch e001 --until e008
    """
    from pipeline.cluster.config import load_cluster
    from pipeline.config import epoch_number, load
    from pipeline.errors import UsageError

    config, loaded = load_cluster(conf), load(params, set_ or ())
    last = until or epoch
    loaded.previous(epoch), loaded.previous(last)  # refuses epochs that params.yaml does not have
    epochs = [
        name for name in loaded.epochs if epoch_number(epoch) <= epoch_number(name) <= epoch_number(last)
    ]
    if not epochs:
        raise UsageError(f"--until {last} lies before --epoch {epoch}")
    if dry:
        for name in epochs:
            for stage in ORDER:
                print(_script(stage, name, root, params, set_, config))
        return
    _base(root, params, set_, loaded.previous(epochs[0]))
    _remember(root, epoch, last, params, set_)
    _chain(epochs, root, params, set_, config)


@app.command()
def resume(root: o.Root = o.ARTIFACTS, conf: Conf = None) -> None:
    """Submit again what failed, was cancelled or got lost of the last `cluster submit`.

    Example: wcpipe cluster resume
    """
    from pipeline import files

    said = files.read_json(root / "log" / "cluster" / "chain.json", "run `wcpipe cluster submit` first")
    submit(
        epoch=said["epoch"],
        until=said["until"],
        root=root,
        params=Path(said["params"]),
        set_=said["set"],
        conf=conf,
        dry=False,
    )


@app.command()
def status(
    root: o.Root = o.ARTIFACTS, epoch: OptionalEpoch = None, conf: Conf = None, json: o.Json = False
) -> None:
    """Say of every submitted stage how many tasks are done, running and waiting, and why others are not.

    Example: wcpipe cluster status --epoch e001
    """
    import json as json_

    from stages.cluster_status import rows, table

    found = rows(root, epoch, _config(conf))
    if json:
        print(json_.dumps(found))
    else:
        table(found)


@app.command()
def logs(
    stage: Annotated[str, typer.Argument(help="Such as rollout.", show_default=False)],
    epoch: o.Epoch,
    root: o.Root = o.ARTIFACTS,
    task: Annotated[int, typer.Option(help="Array task, from 1.")] = 1,
    lines: Annotated[int, typer.Option(help="How many of the last lines.")] = 40,
) -> None:
    """Print the end of a task's log.

    Example: wcpipe cluster logs rollout --epoch e001 --task 3
    """
    from pipeline.errors import DataError
    from stages.jobs import JobFolder

    folder = JobFolder(root, epoch, stage)
    if not folder.log(task).exists():
        there = sorted((path.stem for path in folder.path.glob("logs/*.log")), key=int)
        raise DataError(
            f"{folder.log(task)}: is missing; there are logs of task {', '.join(there) or '- none'}"
        )
    print(f"{folder.log(task)}:")
    print(folder.last_words(task, lines))


@app.command()
def cancel(
    root: o.Root = o.ARTIFACTS, epoch: OptionalEpoch = None, stage: OptionalStage = None, conf: Conf = None
) -> None:
    """Cancel submitted stages; finished groups stay.

    Example: wcpipe cluster cancel --epoch e001 --stage rollout
    """
    from stages.follow import Follower
    from stages.jobs import SUBMITTED, SUBMITTING, JobFolder

    config = _config(conf)
    for folder in reversed(JobFolder.all_below(root)):  # the last of a chain first: nothing starts meanwhile
        record = folder.read()
        if record is None or epoch not in (None, folder.epoch) or stage not in (None, folder.stage):
            continue
        if record.state in (SUBMITTING, SUBMITTED):
            with folder.locked():
                Follower(folder, config).end(record, "asked to")
            print(f"{folder.stage} {folder.epoch}: cancelled", file=sys.stderr)


@app.command(context_settings={"ignore_unknown_options": True}, hidden=True)
def task(
    command: Annotated[list[str], typer.Argument(show_default=False)],
    job: Annotated[Path, typer.Option(show_default=False)],
    signal: Annotated[str, typer.Option()] = "USR2",
    retries: Annotated[int, typer.Option()] = 3,
    restarts: Annotated[int, typer.Option()] = 20,
    ranks: Annotated[int, typer.Option()] = 1,
) -> None:
    """What the rendered scripts start: runs a stage as an array task, and queues it again where that helps."""
    from stages.cluster_task import run_task

    sys.exit(run_task(job, command, signal, retries, restarts, ranks))


@app.command()
def sizes(json: o.Json = False) -> None:
    """Print sizes and file counts of every artifact at paper scale (64 prompts, 16 candidates, 253 frames at 480p).

    Example: wcpipe cluster sizes
    """
    import json as json_

    from pipeline.cluster.sizes import paper_epoch, table

    found = paper_epoch()
    print(json_.dumps([row.to_json() for row in found]) if json else table(found))


# ---------------------------------------------------------------- a chain of stages


def _config(conf: Path | None) -> ClusterConfig:
    from pipeline.cluster.config import load_cluster

    return load_cluster(conf)


def _base(root: Path, params: Path, set_: list[str] | None, previous: str) -> None:
    """Put the base in place when the chain starts from it and it is not there: it only copies files."""
    from pipeline.config import BASE_EPOCH
    from pipeline.updates.checkpoint import STATE
    from stages.base import run_base
    from stages.common import EpochPaths, load_params

    if previous == BASE_EPOCH and not (EpochPaths(root, BASE_EPOCH).policy / STATE).exists():
        run_base(load_params(params, set_), root)


def _remember(root: Path, epoch: str, until: str, params: Path, set_: list[str] | None) -> None:
    from pipeline import files

    said = {"epoch": epoch, "until": until, "params": str(params), "set": set_}
    files.write_json(root / "log" / "cluster" / "chain.json", said)


def _command(stage: str, epoch: str, root: Path, set_: list[str] | None) -> list[str]:
    overrides = [word for override in set_ or () for word in ("--set", override)]
    return ["wcpipe", stage, "--epoch", epoch, "--root", str(root), *overrides]


def _chain(
    epochs: list[str], root: Path, params: Path, set_: list[str] | None, config: ClusterConfig
) -> None:
    """Submit what is not done, in order; what follows something that is submitted now is submitted too."""
    from stages.follow import Follower
    from stages.jobs import SUBMITTED, SUBMITTING, JobFolder
    from stages.launch import prepare

    before: list[str] = []  # jobs that the next stage has to wait for
    renewed = False
    for epoch in epochs:
        for stage in ORDER:
            folder = JobFolder(root, epoch, stage)
            follower = Follower(folder, config)
            command = _command(stage, epoch, root, set_)
            wanted = prepare(folder, stage, epoch, command, params, set_, config)
            with folder.locked():
                found = folder.read()
                if found is not None and found.state == SUBMITTING:
                    follower.recover(found)
                same = found is not None and found.fingerprint == wanted.fingerprint and not renewed
                if same and found is not None and len(folder.finished(found)) == found.tasks:
                    before = []
                    continue
                if same and found is not None and _waiting(follower, folder, found):
                    before = found.ids
                    continue
                if found is not None and found.state in (SUBMITTING, SUBMITTED):
                    follower.end(found, "submitted anew")
                wanted.dependency = f"afterok:{':'.join(before)}" if before else ""
                follower.submit(wanted, wanted.all_tasks)
                before, renewed = wanted.ids, True


def _waiting(follower: Follower, folder: JobFolder, record: JobRecord) -> bool:
    """Whether all tasks of a record that are not done are queued or running, and so will be."""
    left = [task for task in record.all_tasks if not folder.is_done(record, task)]
    states = follower.slurm.states(record.ids, left, record.since)
    never = any(state.reason == "DependencyNeverSatisfied" for state in states.values())
    return not never and all(state.living for state in states.values())


def _script(
    stage: str, epoch: str, root: Path, params: Path, set_: list[str] | None, config: ClusterConfig
) -> str:
    from pipeline.cluster.script import Job, render
    from pipeline.config import load
    from stages.jobs import JobFolder
    from stages.launch import parts

    tasks = parts(stage, epoch, load(params, set_ or ()), config)
    folder = JobFolder(root, epoch, stage).path.resolve()
    command = [*_command(stage, epoch, root, set_), "--params", str(params)]
    job = Job(f"wcpipe.{epoch}.{stage}", stage, command, tasks, range(1, tasks + 1), folder, Path.cwd())
    return render(job, config)
