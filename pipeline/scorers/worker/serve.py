"""The worker's end of the protocol: load an adapter once, then measure batch after batch until the input closes.

A worker outlives its batches, never its stage: when the stage is gone, however it went, the next beat fails to be
written and the process ends, so that no orphan keeps a GPU's memory. Signals that ask a stage to stop (Ctrl-C, a
scheduler's SIGTERM to all of a job) are ignored here: the stage decides when it has what it needs.

Packages print what they like to stdout, so the answers go to a private copy of it and everything else to stderr, which
the stage keeps as the worker's log.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from pipeline.scorers.worker import protocol
from pipeline.scorers.worker.protocol import Failed, Item, Outcome

ADAPTERS = {
    "hpsv3": "pipeline.scorers.worker.adapters.hpsv3",
    "depth-anything-3": "pipeline.scorers.worker.adapters.depth_anything_3",
    "cotracker": "pipeline.scorers.worker.adapters.cotracker",
    "roma": "pipeline.scorers.worker.adapters.roma",
}


class Adapter(Protocol):
    """Calls one package. A module has `load(settings, device) -> Adapter`."""

    version: str  # package and adapter, such as "hpsv3 1.0.0, adapter 1"
    weights: str  # digest of the weights; "random" where there are none

    def measure(self, items: Sequence[Item]) -> Iterable[Outcome]:
        """One outcome an item, in their order, each as soon as it is known. The same for any batch that it is in."""


def find_adapter(scorer: str) -> Any:
    """The adapter's module: a name of ADAPTERS, or the path of a Python file with a `load` of its own."""
    if scorer in ADAPTERS:
        return importlib.import_module(ADAPTERS[scorer])
    path = Path(scorer)
    spec = importlib.util.spec_from_file_location(f"scorer_{path.stem}", path)
    if path.suffix != ".py" or spec is None or spec.loader is None:
        raise protocol.ProtocolError(
            f"unknown scorer {scorer!r}; known: {', '.join(ADAPTERS)}, or a .py file"
        )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Channel:
    """Writes whole lines from any thread. The process ends when nobody reads them."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._lock = stream, threading.Lock()

    def send(self, type_: str, **fields: Any) -> None:
        text = protocol.line(type_, **fields)
        with self._lock:
            try:
                self._stream.write(text)
                self._stream.flush()
            except OSError:
                os._exit(1)  # the stage is gone; nothing of it must go on, threads of libraries included

    def beat(self, seconds: float) -> None:
        """Say for ever that this process lives. A thread of its own does it."""
        while True:
            time.sleep(seconds)
            self.send("beat")


def private_streams() -> tuple[BinaryIO, BinaryIO]:
    """(requests, answers): copies of stdin and stdout that no library can reach; stdout now goes to stderr."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return requests, answers


def serve(requests: BinaryIO, channel: Channel) -> int:
    """Answer until the input closes; returns the exit code."""
    hello = protocol.parse(requests.readline() or b'{"type": "nothing"}')
    if hello["type"] != "hello":
        channel.send("refused", reason=f"the first message is {hello['type']!r}, not hello")
        return 2
    if hello["protocol"] != protocol.VERSION:
        channel.send("refused", reason=f"protocol {hello['protocol']}, this worker speaks {protocol.VERSION}")
        return 2
    # beats start before anything is loaded: reading 17 GB of weights is no reason to be thought dead
    threading.Thread(target=channel.beat, args=(float(hello["beat"]),), daemon=True).start()
    try:
        adapter: Adapter = find_adapter(hello["scorer"]).load(hello["settings"], hello["device"])
    except Exception as error:  # whatever a package raises while loading, the stage must learn the reason
        traceback.print_exc()  # to the log, and before the refusal: on that the stage ends this process at once
        sys.stderr.flush()
        channel.send("refused", reason=protocol.one_line(error))
        return 1
    channel.send("ready", protocol=protocol.VERSION, version=adapter.version, weights=adapter.weights)
    for text in iter(requests.readline, b""):
        message = protocol.parse(text)
        if message["type"] == "measure":
            answer(adapter, Path(message["manifest"]), int(message["id"]), channel)
    return 0


def answer(adapter: Adapter, manifest: Path, id_: int, channel: Channel) -> None:
    """Measure one batch, a line an item. An error of the whole batch leaves its unanswered items to the stage."""
    start, busy, index = time.perf_counter(), time.process_time(), -1
    try:
        items = protocol.read_request(manifest)
        measured, own = time.perf_counter(), time.process_time()
        for index, outcome in enumerate(adapter.measure(items)):
            seed = items[index].seed
            if isinstance(outcome, Failed):
                channel.send("item", id=id_, index=index, seed=seed, status="failed", reason=outcome.reason)
            else:
                values = protocol.encode(outcome, manifest.parent, index)
                channel.send("item", id=id_, index=index, seed=seed, status="ok", values=values)
        if index + 1 != len(items):
            raise protocol.ProtocolError(
                f"{adapter.version} gave {index + 1} outcomes for {len(items)} items"
            )
    except (
        Exception
    ) as error:  # any of a package's own; the stage halves the batch to find the item it is about
        traceback.print_exc()
        forget_memory()
        channel.send("batch_failed", id=id_, reason=protocol.one_line(error))
        return
    ended, cpu = time.perf_counter(), time.process_time()
    channel.send(
        "done", id=id_, seconds=ended - measured, all_seconds=ended - start, cpu=cpu - own, all_cpu=cpu - busy
    )


def forget_memory() -> None:
    """After an out-of-memory error the half batch must find what the whole one had taken."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> int:
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    requests, answers = private_streams()
    return serve(requests, Channel(answers))
