"""The stage's end of the protocol: one long-lived worker that may die at any moment, and items that must not be lost.

* An item is finished when its line has arrived; what a dead worker had finished stays.
* A worker that dies (out of memory too), falls silent, or exceeds its time is ended and started again. Its unfinished
  items are halved until the one that it dies of stands alone; that one gets `tries` tries and is then *missing*, with
  the reason. So does an item on which the package raises an error.
* A worker that cannot be started at all, or dies on every item for a long time, is no fault of any clip: the stage
  stops with one line, and what it had finished stays.

Nothing here imports torch, and nothing but the protocol is shared with the worker.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from pipeline.errors import ScorerUnavailable
from pipeline.scorers.worker import protocol
from pipeline.scorers.worker.protocol import Failed, Item, Outcome

MAIN = Path(__file__).with_name("main.py")
_FOREIGN = (
    "PYTHONPATH",
    "PYTHONHOME",
    "PYTHONSTARTUP",
    "VIRTUAL_ENV",
)  # they would lead back into the core's packages


@dataclass(frozen=True)
class Limits:
    """How long a worker may take and how often an item is tried; none of it changes a value.

    batch     items a request
    start     seconds until it is ready; reading weights from a slow disk takes minutes
    item      seconds an item of a batch may take; a batch has that of all its items
    silence   seconds without a sign of life, once it has given one; a worker says something every `beat`
    tries     how often an item that the worker dies of alone is tried
    give_up   items in a row that the worker died of before the stage stops
    """

    batch: int = 8
    start: float = 900.0
    item: float = 120.0
    silence: float = 120.0
    beat: float = 1.0
    tries: int = 2
    give_up: int = 24


SCRATCH = "wcpipe-scorer-"


def sweep(folder: Path) -> int:
    """Delete what stages that were killed left in the temporary `folder` of this machine; returns how many."""
    count = 0
    for path in folder.glob(f"{SCRATCH}*-*"):
        owner = path.name[len(SCRATCH) :].split("-")[0]
        if owner.isdigit() and not Path("/proc", owner).exists() and Path("/proc").exists():
            shutil.rmtree(path, ignore_errors=True)
            count += 1
    return count


class WorkerDied(Exception):
    """The worker is gone, silent, too slow or talking nonsense; the message is the reason that items get."""


class Worker:
    """One process of one scorer. A context manager; starts with the first batch and again after each death."""

    def __init__(
        self,
        name: str,
        python: Path,
        settings: Mapping[str, Any],
        *,
        scorer: str | None = None,
        device: str = "cpu",
        limits: Limits = Limits(),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`scorer` is the adapter where it is not called `name`, or a .py file. `environment` is added."""
        self.name, self.limits = name, limits
        self._command = [str(python), "-u", str(MAIN)]
        self._hello = {
            "protocol": protocol.VERSION,
            "scorer": scorer or name,
            "settings": dict(settings),
            "device": device,
            "beat": limits.beat,
        }
        self._environment = {key: value for key, value in os.environ.items() if key not in _FOREIGN}
        # weights come from local folders only; a worker that waits for a hub that a compute node cannot reach hangs
        self._environment |= {
            "PYTHONNOUSERSITE": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self._environment |= dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer, self._heard = b"", False
        self._scratch: Path | None = None
        self._requests = 0
        self._lost_in_a_row = 0
        self.version, self.weights = "", ""  # known once it is ready
        self.starts = 0
        self.seconds = {"worker": 0.0, "all": 0.0, "cpu": 0.0, "all_cpu": 0.0}  # as the worker counts them

    # ---------------------------------------------------------------- measuring

    def measure(self, items: Sequence[Item]) -> list[Outcome]:
        """One outcome an item, in their order. Raises ScorerUnavailable, ProtocolError for an item that is no video."""
        for item in items:
            protocol.check_item(item)
        found: dict[int, Outcome] = {}
        tried = dict.fromkeys(range(len(items)), 0)
        size = self.limits.batch
        todo = deque(
            list(range(start, min(start + size, len(items)))) for start in range(0, len(items), size)
        )
        while todo:
            batch = todo.popleft()
            reason, died = self._try(items, batch, found)
            left = [index for index in batch if index not in found]
            if not left:
                continue
            if len(left) > 1:
                half = (len(left) + 1) // 2
                todo.extendleft([left[half:], left[:half]])
                continue
            alone = len(batch) == 1  # otherwise another item of the batch may have taken the memory
            tried[left[0]] += alone
            if alone and (not died or tried[left[0]] >= self.limits.tries):
                tries = f", tried {tried[left[0]]} times" if tried[left[0]] > 1 else ""
                found[left[0]] = Failed(f"{reason}{tries}")
                self._count_lost(died, reason)
            else:
                todo.appendleft(left)
        return [found[index] for index in range(len(items))]

    def _try(self, items: Sequence[Item], batch: list[int], found: dict[int, Outcome]) -> tuple[str, bool]:
        """Ask for one batch and keep what arrives; returns why something may be left, and whether the worker died."""
        self.start()
        folder = self._folder(f"r{self._requests}")
        self._requests += 1
        try:
            manifest = protocol.write_request(folder, [items[index] for index in batch])
            return self._ask(manifest, batch, found), False
        except WorkerDied as death:
            self._end(kill=True)
            return str(death), True
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _ask(self, manifest: Path, batch: list[int], found: dict[int, Outcome]) -> str:
        id_, limit = self._requests, self.limits.item * len(batch)
        self._send("measure", id=id_, manifest=str(manifest))
        deadline = time.monotonic() + limit
        while True:
            message = self._receive(deadline, f"took longer than {limit:g} s for {len(batch)} items")
            if message["type"] == "beat" or message.get("id") != id_:
                continue
            if message["type"] == "item":
                found[batch[int(message["index"])]] = self._outcome(message, manifest.parent)
                self._lost_in_a_row = 0
            elif message["type"] == "done":
                for name, key in (
                    ("worker", "seconds"),
                    ("all", "all_seconds"),
                    ("cpu", "cpu"),
                    ("all_cpu", "all_cpu"),
                ):
                    self.seconds[name] += float(message[key])
                return "the worker left it out"
            elif message["type"] == "batch_failed":
                return str(message["reason"])

    @staticmethod
    def _outcome(message: Mapping[str, Any], folder: Path) -> Outcome:
        if message["status"] != "ok":
            return Failed(str(message["reason"]))
        try:
            return protocol.decode(message["values"], folder)
        except protocol.ProtocolError as error:
            raise WorkerDied(f"its answer cannot be read: {error}") from error

    def _count_lost(self, died: bool, reason: str) -> None:
        self._lost_in_a_row += died
        if self._lost_in_a_row >= self.limits.give_up:
            raise ScorerUnavailable(
                f"{self.name}: the worker died on {self._lost_in_a_row} items in a row ({reason}): this is not about "
                f"single clips; what was finished stays, look at `wcpipe scorers check {self.name}`"
            )

    # ---------------------------------------------------------------- the process

    def start(self) -> None:
        """Start the worker unless it runs, and shake hands. Raises ScorerUnavailable with the worker's last words."""
        if self._process is not None:
            if self._process.poll() is None:
                return
            self._end(kill=True)
        log = self._folder("") / "worker.log"
        try:
            with log.open("ab") as errors:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=self._environment,
                    start_new_session=True,  # Ctrl-C is for the stage, which then ends the worker
                    bufsize=0,
                )
        except OSError as error:
            raise ScorerUnavailable(
                f"{self._command[0]}: cannot be started ({error.strerror}); run `wcpipe scorers install {self.name}`"
            ) from error
        self.starts += 1
        self._buffer, self._heard = b"", False
        try:
            self._send("hello", **self._hello)
            deadline = time.monotonic() + self.limits.start
            message = {"type": "beat"}
            while message["type"] == "beat":
                message = self._receive(deadline, f"was not ready after {self.limits.start:g} s")
        except WorkerDied as death:
            self._refuse(str(death))
        if message["type"] != "ready" or message.get("protocol") != protocol.VERSION:
            self._refuse(str(message.get("reason", f"it speaks protocol {message.get('protocol')}")))
        known, self.version, self.weights = (
            (self.version, self.weights),
            message["version"],
            message["weights"],
        )
        if known[0] and known != (self.version, self.weights):
            self._refuse(
                f"it came back as another scorer ({self.version}); its weights or its package were replaced"
            )

    def _refuse(self, reason: str) -> None:
        words = self.last_words()
        self._end(kill=True)
        more = f"; its last words: {words}" if words and words not in reason else ""
        raise ScorerUnavailable(
            f"{self.name}: the worker cannot be used: {reason}{more}; run `wcpipe scorers check {self.name}`"
        )

    def _send(self, type_: str, **fields: Any) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(protocol.line(type_, **fields))
        except OSError as error:
            raise WorkerDied(self._death()) from error

    def _receive(self, deadline: float, late: str) -> dict[str, Any]:
        """The next message. Raises WorkerDied at the end of the stream, on silence and at the deadline."""
        assert self._process is not None
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        # before its first line a worker is an interpreter that starts, from a slow disk perhaps: `start` limits that
        silent = time.monotonic() + self.limits.silence if self._heard else deadline
        while b"\n" not in self._buffer:
            now = time.monotonic()
            if now >= deadline:
                raise WorkerDied(f"the worker {late}")
            if now >= silent:
                raise WorkerDied(f"the worker gave no sign of life for {self.limits.silence:g} s")
            if select.select([pipe], [], [], min(deadline, silent) - now)[0]:
                part = os.read(pipe, 1 << 16)
                if not part:
                    raise WorkerDied(self._death())
                self._buffer += part
        text, self._buffer = self._buffer.split(b"\n", 1)
        self._heard = True
        if time.monotonic() >= deadline:  # beats arrive in time, the answer does not
            raise WorkerDied(f"the worker {late}")
        try:
            return protocol.parse(text)
        except protocol.ProtocolError as error:
            raise WorkerDied(f"the worker talks nonsense: {error}") from error

    def _death(self) -> str:
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        code = self._process.returncode
        how = "closed its output" if code is None else f"ended with exit code {code}"
        if code is not None and code < 0:
            memory = " (out of memory?)" if -code == signal.SIGKILL else ""
            how = f"was killed by {signal.Signals(-code).name}{memory}"
        words = self.last_words()
        return f"the worker {how}" + (f"; its last words: {words}" if words else "")

    def log(self) -> str:
        """All that the worker wrote to stdout and stderr since the first start."""
        return self._log(1 << 24)

    def last_words(self) -> str:
        """The last line of the log, where the cause of a death usually stands."""
        lines = self._log(4096).strip().splitlines()
        return lines[-1][:160] if lines else ""

    def _log(self, at_most: int) -> str:
        if self._scratch is None or not (self._scratch / "worker.log").exists():
            return ""
        with (self._scratch / "worker.log").open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - at_most))
            return file.read().decode(errors="replace")

    @property
    def pid(self) -> int | None:
        """Of the running process."""
        return None if self._process is None else self._process.pid

    def _folder(self, name: str) -> Path:
        if self._scratch is None:
            sweep(Path(tempfile.gettempdir()))
            self._scratch = Path(tempfile.mkdtemp(prefix=f"{SCRATCH}{os.getpid()}-"))
        folder = self._scratch / name
        folder.mkdir(exist_ok=True)
        return folder

    def _end(self, kill: bool) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(OSError):
            if process.stdin is not None:
                process.stdin.close()  # the end of the input is the request to stop
        if not kill:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # a session of its own: its helpers end with it
            process.wait()
        if process.stdout is not None:
            process.stdout.close()

    def close(self) -> None:
        """End the worker and delete its files."""
        self._end(kill=False)
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
