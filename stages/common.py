"""What every stage needs around its computation: where artifacts lie, progress, stopping, and a summary.

A stage function takes parsed parameters and returns a plain summary, so `wcpipe run` calls the very functions that
the commands call. Clocks stay out of artifacts: how long something took goes to the summary and to `<root>/log/`.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pipeline.errors import Interrupted, UsageError

if TYPE_CHECKING:
    from types import FrameType

    from rich.progress import Progress

    from pipeline.config import Params
    from pipeline.stores import GroupStore, Shard
    from pipeline.updates.policy import SetName
    from pipeline.worlds.wan_world import WanWorld

T = TypeVar("T")


@dataclass(frozen=True)
class EpochPaths:
    """Where the artifacts of one epoch lie (DESIGN 2)."""

    root: Path
    epoch: str

    @property
    def folder(self) -> Path:
        return self.root / self.epoch

    @property
    def base(self) -> Path:
        return self.root / "base"

    @property
    def prefixes(self) -> Path:
        return self.folder / "prefixes.zarr"

    @property
    def rollouts(self) -> Path:
        return self.folder / "rollouts.zarr"

    @property
    def advantages(self) -> Path:
        return self.folder / "advantages.zarr"

    @property
    def policy(self) -> Path:
        return self.folder / "policy"

    @property
    def pretrained(self) -> Path:
        """Where `world.base: pretrain` trains the base, before it is copied to `base`."""
        return self.root / "pretrain"

    def scores(self, scorer: str) -> Path:
        return self.folder / "scores.zarr" / scorer

    def metrics(self, stage: str) -> Path:
        return self.folder / "metrics" / f"{stage}.json"


def first_stage(paths: EpochPaths, stage: str) -> str:
    """The stage up to `stage` that has to run first: the earliest whose store is not there or not finished."""
    from pipeline.errors import DataError
    from pipeline.stores import GroupStore

    def finished(path: Path) -> bool:
        try:
            return not GroupStore.open(path).pending()
        except DataError:
            return False

    scores = sorted(paths.scores("").glob("*/"))
    order = {
        "prefix": [paths.prefixes],
        "rollout": [paths.rollouts],
        "score": scores or [paths.scores("")],
        "advantage": [paths.advantages],
    }
    for name, stores in order.items():
        if name == stage or not all(map(finished, stores)):
            return name
    return stage


def need(paths: EpochPaths, stage: str, path: Path) -> GroupStore:
    """The finished store at `path` that `stage` writes. Raises DataError naming the command that has to run first."""
    from pipeline.errors import DataError
    from pipeline.stores import GroupStore

    try:
        return GroupStore.open(path).require_complete("")
    except DataError:
        remedy = f"run `wcpipe {first_stage(paths, stage)} --epoch {paths.epoch}`"
        return GroupStore.open(path, remedy).require_complete(remedy)


def need_policy(paths: EpochPaths) -> Path:
    """The folder of an epoch's policy. Raises CheckpointError naming the command that has to run first."""
    from pipeline.config import BASE_EPOCH
    from pipeline.errors import CheckpointError
    from pipeline.updates.checkpoint import STATE, recover

    recover(paths.policy)  # before anything says that it is not there
    if not (paths.policy / STATE).exists():
        stage = f"{first_stage(paths, 'update')} --epoch {paths.epoch}"
        first = "base" if paths.epoch == BASE_EPOCH else stage
        raise CheckpointError(f"{paths.policy}: holds no policy; run `wcpipe {first}`")
    return paths.policy


def open_weights(params: Params, base: Path, policy: Path, weights: SetName) -> WanWorld:
    """The world of these parameters under one weight set of a saved policy, for inference."""
    from pipeline.worlds.registry import open_policy

    truncate = params.sampler.truncate_timestep
    return open_policy(params.world.name, base, policy, weights, params.update, params.seed, truncate)


@dataclass
class Stopwatch:
    """Seconds by name, for summaries and logs; never for artifacts."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def rounded(self) -> dict[str, float]:
        return {name: round(value, 3) for name, value in self.seconds.items()}


class StopRequest:
    """A signal sets a flag; the stage stops when the current item is finished, so nothing has to be redone.

    A second Ctrl-C stops at once: stores survive that too.
    """

    def __init__(self) -> None:
        self.name: str | None = None

    def install(self) -> None:
        for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"):
            signal.signal(getattr(signal, name), self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.name is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name

    def check(self, what: str = "after a finished group; run the same command again to go on") -> None:
        """Raise Interrupted (exit code 75) if a signal has come; call it after each item.

        `what` completes "stopped by SIGTERM ...": what is lost, if anything, and how to go on.
        """
        if self.name is not None:
            name, self.name = self.name, None
            raise Interrupted(f"stopped by {name} {what}")


STOP = StopRequest()


def track(items: Iterable[T], label: str, total: int) -> Iterator[T]:
    """Iterate with a progress bar on a terminal, silently elsewhere, and stop between items when asked to."""
    if not sys.stderr.isatty() or total == 0:
        for item in items:
            yield item
            STOP.check()
        return
    with _progress() as progress:
        task = progress.add_task(label, total=total)
        for item in items:
            yield item
            progress.advance(task)
            STOP.check()


@contextmanager
def step_bar(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yields `advance(done)`: a progress bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty() or total == 0:
        yield lambda done: None
        return
    with _progress() as progress:
        task = progress.add_task(label, total=total)
        yield lambda done: progress.update(task, completed=done)


def _progress() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description:<18}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def parse_shard(text: str) -> Shard:
    """`2/4` -> the second of four parts; `16:32` -> the groups 16 to 31. Raises UsageError."""
    from pipeline.stores import Shard

    first, _, end = text.partition(":")
    if first.isdigit() and end.isdigit() and int(first) < int(end):
        return Shard(only=(int(first), int(end)))
    index, _, count = text.partition("/")
    if not (index.isdigit() and count.isdigit()) or not 1 <= int(index) <= int(count):
        raise UsageError(f"--shard {text}: write i/n with 1 <= i <= n, for example 1/4, or groups, as 16:32")
    return Shard(int(index), int(count))


def load_params(path: Path, overrides: Iterable[str] | None) -> Params:
    from pipeline import config

    return config.load(path, overrides or ())


def log_run(root: Path, epoch: str, stage: str, summary: dict[str, Any]) -> None:
    """Append the summary with its timings to `<root>/log/<stage>.jsonl`: beside the artifacts, tracked by nothing."""
    folder = root / "log"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{stage}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"epoch": epoch, **summary}) + "\n")


def report(summary: dict[str, Any], as_json: bool) -> None:
    """Print a stage's summary: one JSON object for programs, or one line for people."""
    if as_json:
        print(json.dumps(summary))
        return
    head = " ".join(str(summary[key]) for key in ("stage", "epoch") if key in summary)
    parts = [f"{name} {_shown(value)}" for name, value in summary.items() if name not in ("stage", "epoch")]
    print(f"{head}: {', '.join(parts)}")


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return "(" + ", ".join(f"{name} {_shown(item)}" for name, item in value.items()) + ")"
    if isinstance(value, list):
        return "[" + ", ".join(map(_shown, value)) + "]"
    return str(value)


def staged(stage: str) -> Callable[[Callable[..., dict[str, Any]]], Callable[..., dict[str, Any]]]:
    """Decorate `run_<stage>(params, epoch, root, ...)`: adds stage, epoch and wall time to the summary and logs it."""

    def decorate(function: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        def wrapped(params: Params, epoch: str, root: Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
            start, rank = time.perf_counter(), _rank(stage)
            summary = {"stage": stage, "epoch": epoch, **function(params, epoch, root, *args, **kwargs)}
            summary["seconds"] = round(time.perf_counter() - start, 2)
            if rank == 0:
                log_run(root, epoch, stage, summary)
            return summary

        wrapped.__name__ = function.__name__
        wrapped.__doc__ = function.__doc__
        return wrapped

    return decorate


def _rank(stage: str) -> int:
    """This process's number under torchrun, which is for the update alone. Raises UsageError in other stages."""
    from pipeline.updates.environment import place

    here = place()
    if here.size > 1 and stage != "update":
        raise UsageError(
            f"`wcpipe {stage}` is one process, but WORLD_SIZE is {here.size}: call it without torchrun; "
            "where a stage can be split, --shard splits it"
        )
    return here.rank
