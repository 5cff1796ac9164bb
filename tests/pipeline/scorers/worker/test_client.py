"""A worker may die, hang, freeze, fall silent or talk nonsense; no item that can be measured is lost, none is invented.

Every test runs a real worker process with the adapter of double.py.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.errors import DependencyError, ScorerUnavailable
from pipeline.scorers.worker import client, protocol, serve
from pipeline.scorers.worker.client import Limits, Worker
from pipeline.scorers.worker.protocol import Failed, Item, Outcome, ProtocolError
from tests.pipeline.scorers.worker import double

PYTHON = Path(sys.executable)
QUICK: dict[str, Any] = {"start": 60.0, "item": 20.0, "silence": 20.0, "beat": 0.1}


def worker(limits: dict[str, Any] | None = None, **settings: Any) -> Worker:
    return Worker("double", PYTHON, settings, scorer=double.__file__, limits=Limits(**QUICK | (limits or {})))


def items(*codes: int) -> list[Item]:
    """Videos of 3 frames; item i's frame f has brightness 10 i + f."""
    made = []
    for index, code in enumerate(codes):
        video = np.empty((4, 2, 3, 3), np.uint8)
        video[:] = 10 * index + np.arange(-1, 3).reshape(4, 1, 1, 1).clip(0)
        video[0] = code
        made.append(Item(video, seed=index))
    return made


def means(outcomes: list[Outcome]) -> list[float | None]:
    return [None if isinstance(outcome, Failed) else float(outcome["mean"][0]) for outcome in outcomes]


EIGHT = [10.0 * index for index in range(8)]


@pytest.mark.parametrize("batch", [1, 2, 3, 50])
def test_order_is_kept_under_any_batch_size(batch: int) -> None:
    with worker({"batch": batch}) as running:
        outcomes = running.measure(items(*[double.FINE] * 8))
        assert means(outcomes) == EIGHT
        assert [int(outcome["seed"]) for outcome in outcomes if not isinstance(outcome, Failed)] == list(
            range(8)
        )
        assert running.measure([]) == []
        assert running.starts == 1
        assert (running.version, running.weights) == ("double 1", "none")


def test_arrays_arrive_exactly_and_large_ones_by_file() -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "small": rng.normal(size=(3, 2)).astype(np.float32),
        "large": rng.normal(size=(40, 7)),
        "lost": np.array([[1.0, np.nan], [np.inf, -0.0]]),
        "flags": np.array([True, False]),
        "counts": np.arange(5, dtype=np.int64),
        "empty": np.zeros((0, 2), np.float32),
    }
    with worker() as running:
        (found,) = running.measure([Item(np.zeros((3, 4, 4, 3), np.uint8), arrays)])
    assert isinstance(found, dict)
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (double.RAISES, "RuntimeError: cannot read this clip"),
        (double.DIES, r"killed by SIGKILL \(out of memory\?\).*tried 2 times"),
        (double.FAILED, "no texture"),
    ],
)
@pytest.mark.parametrize("batch", [1, 8])
def test_one_bad_clip_of_eight_leaves_seven_scored(code: int, reason: str, batch: int) -> None:
    import re

    codes = [double.FINE] * 8
    codes[5] = code
    with worker({"batch": batch}) as running:
        outcomes = running.measure(items(*codes))
        assert means(outcomes) == [*EIGHT[:5], None, *EIGHT[6:]]
        assert isinstance(outcomes[5], Failed)
        assert re.search(reason, outcomes[5].reason)
        assert means(running.measure(items(double.FINE))) == [0.0]  # and it goes on


@pytest.mark.parametrize(
    ("code", "limits", "reason"),
    [
        (double.HANGS, {"item": 4.0}, "took longer than 4 s for 1 items"),
        (double.FREEZES, {"silence": 4.0}, "no sign of life for 4 s"),
    ],
)
def test_a_worker_that_hangs_is_ended(code: int, limits: dict[str, Any], reason: str) -> None:
    with worker({"batch": 2, "tries": 1, **limits}) as running:
        outcomes = running.measure(items(0, code, 0, 0))
    assert means(outcomes) == [0.0, None, 20.0, 30.0]
    assert isinstance(outcomes[1], Failed)
    assert reason in outcomes[1].reason


@pytest.mark.parametrize(
    ("code", "batch"),
    [
        (double.DIES, 1),
        (double.DIES, 3),
        (double.RAISES, 1),
        (double.RAISES, 3),
        (double.HANGS, 3),
        (double.FREEZES, 3),
    ],
)
def test_what_goes_wrong_once_loses_nothing(code: int, batch: int, tmp_path: Path) -> None:
    limits = {"item": 4.0, "silence": 4.0, "batch": batch, "tries": 2}
    with worker(limits, once=str(tmp_path)) as running:
        outcomes = running.measure(items(0, code, 0, 0))
    expected: list[float | None] = [0.0, 10.0, 20.0, 30.0]
    if code == double.RAISES and batch == 1:  # an error alone is the clip's own and not tried twice
        expected[1] = None
    assert means(outcomes) == expected


def test_kill_9_in_mid_batch_loses_nothing_and_measures_nothing_twice(tmp_path: Path) -> None:
    progress = tmp_path / "progress"
    progress.touch()
    with worker({"batch": 8}, pid=True, progress=str(progress)) as running:
        running.start()
        pid = running.pid
        assert pid is not None

        def kill() -> None:
            wait_for(
                lambda: len(progress.read_text()) >= 3, "the worker did nothing"
            )  # two are answered by then
            os.kill(pid, signal.SIGKILL)

        thread = threading.Thread(target=kill)
        thread.start()
        outcomes = running.measure(items(*[double.SLOW] * 8))
        thread.join()
        assert means(outcomes) == EIGHT
        makers = [int(outcome["pid"]) for outcome in outcomes if not isinstance(outcome, Failed)]
        assert running.starts == 2
        assert 2 <= makers.count(pid) < 8  # what the dead one had answered stays
        assert makers == sorted(makers, key=lambda maker: maker != pid)


def test_a_worker_that_cannot_start_stops_the_stage_with_its_reason(tmp_path: Path) -> None:
    with worker(refuse=True) as running:
        with pytest.raises(
            ScorerUnavailable, match=r"FileNotFoundError: weights/double\.pt is missing; run `wcpipe"
        ):
            running.measure(items(0))
        assert "Traceback" in running.log()
    with pytest.raises(ScorerUnavailable, match="unknown scorer 'nobody'"):
        Worker("nobody", PYTHON, {}, limits=Limits(**QUICK)).measure(items(0))
    with pytest.raises(
        ScorerUnavailable, match=r"cannot be started \(No such file.*wcpipe scorers install double"
    ):
        Worker("double", tmp_path / "python", {}).measure(items(0))
    assert issubclass(ScorerUnavailable, DependencyError)  # exit code 10


def test_the_traceback_is_written_before_the_refusal_on_which_the_stage_ends_the_worker(
    capfd: pytest.CaptureFixture[str],
) -> None:
    written: list[tuple[str, str]] = []

    class Recorder:
        def send(self, type_: str, **fields: Any) -> None:
            written.append((type_, capfd.readouterr().err))

        def beat(self, seconds: float) -> None:
            pass

    hello = {"scorer": double.__file__, "settings": {"refuse": True}, "device": "cpu", "beat": 1.0}
    requests = io.BytesIO(protocol.line("hello", protocol=protocol.VERSION, **hello))
    assert serve.serve(requests, Recorder()) == 1  # type: ignore[arg-type]
    assert [type_ for type_, _ in written] == ["refused"]
    assert "Traceback" in written[0][1]


def test_a_worker_that_dies_while_starting_says_its_last_words(tmp_path: Path) -> None:
    adapter = tmp_path / "bad.py"
    adapter.write_text("import sys, os\nprint('cuda is broken', file=sys.stderr, flush=True)\nos._exit(3)\n")
    bad = Worker("bad", PYTHON, {}, scorer=str(adapter), limits=Limits(**QUICK))
    with pytest.raises(ScorerUnavailable, match="ended with exit code 3; its last words: cuda is broken"):
        bad.measure(items(0))


def test_a_slow_start_is_ended_and_a_long_one_with_beats_is_not(tmp_path: Path) -> None:
    adapter = tmp_path / "slow.py"
    adapter.write_text(
        f"import time\ntime.sleep(6)\n{Path(double.__file__).read_text()}".replace(
            "from __future__ import annotations\n", ""
        )
    )
    slow = Worker("slow", PYTHON, {}, scorer=str(adapter), limits=Limits(**QUICK | {"start": 1.0}))
    with pytest.raises(ScorerUnavailable, match="was not ready after 1 s"):
        slow.measure(items(0))
    with Worker(
        "slow", PYTHON, {}, scorer=str(adapter), limits=Limits(**QUICK | {"silence": 3.0})
    ) as patient:
        assert means(patient.measure(items(0))) == [0.0]


def test_a_worker_that_dies_on_everything_stops_the_stage(tmp_path: Path) -> None:
    expected = pytest.raises(ScorerUnavailable, match="died on 3 items in a row .*not about single clips")
    with worker({"batch": 4, "tries": 1, "give_up": 3}) as running, expected:
        running.measure(items(*[double.DIES] * 6))
    with worker({"batch": 4, "tries": 1, "give_up": 3}) as running:  # one success in between is no such row
        assert means(running.measure(items(2, 2, 0, 2, 2))) == [None, None, 20.0, None, None]


def test_another_scorer_after_a_restart_is_refused(tmp_path: Path) -> None:
    adapter = tmp_path / "changing.py"
    text = Path(double.__file__).read_text()
    adapter.write_text(text)
    with Worker("changing", PYTHON, {}, scorer=str(adapter), limits=Limits(**QUICK)) as running:
        running.start()
        # of another length: Python's bytecode cache cannot tell two files of one length and one second apart
        adapter.write_text(text.replace('"double 1"', '"double 20"'))
        assert running.pid is not None
        os.kill(running.pid, signal.SIGKILL)
        with pytest.raises(ScorerUnavailable, match=r"came back as another scorer \(double 20\)"):
            running.measure(items(0))


@pytest.mark.parametrize(
    "video", [np.zeros((3, 4, 4, 3)), np.zeros((4, 4, 3), np.uint8), np.zeros((0, 4, 4, 3), np.uint8)]
)
def test_what_is_no_video_is_refused_before_anything_starts(video: np.ndarray) -> None:
    with worker() as running:
        with pytest.raises(ProtocolError, match="a video is uint8"):
            running.measure([Item(video)])
        assert running.starts == 0


def test_a_worker_ends_with_its_stage(tmp_path: Path) -> None:
    code = (
        "import sys, os, time\nfrom pathlib import Path\nfrom pipeline.scorers.worker.client import Worker\n"
        f"w = Worker('double', Path(sys.executable), {{}}, scorer={double.__file__!r})\n"
        "w.start()\nprint(w.pid, flush=True)\ntime.sleep(60)\n"
    )
    import subprocess

    root = Path(client.__file__).parents[3]
    stage = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(root)}
    )
    assert stage.stdout is not None
    pid = int(stage.stdout.readline())
    os.kill(stage.pid, signal.SIGKILL)
    stage.wait()
    wait_for(lambda: not alive(pid), "the orphan is still there")
    left = list(Path(client.tempfile.gettempdir()).glob(f"{client.SCRATCH}{stage.pid}-*"))
    assert len(left) == 1  # a killed stage cannot tidy up; the next one does
    with worker() as running:
        running.start()
        assert not left[0].exists()


def alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def wait_for(condition: Callable[[], bool], message: str) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, message
        time.sleep(0.05)


def test_ctrl_c_and_sigterm_are_for_the_stage() -> None:
    with worker() as running:
        running.start()
        assert running.pid is not None
        for name in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(running.pid, name)
        assert means(running.measure(items(0, 0))) == [0.0, 10.0]
        assert running.starts == 1
        assert "a package prints to stdout" in running.log()


def test_the_worker_sees_no_package_of_the_core_by_its_path(tmp_path: Path) -> None:
    adapter = tmp_path / "paths.py"
    adapter.write_text(
        "import sys\nimport numpy as np\n"
        "class A:\n  version, weights = 'a', 'b'\n"
        "  def measure(self, items):\n"
        "    bad = [p for p in sys.path if p.endswith(('worker', 'main')) or '/pipeline' in p or p == '']\n"
        "    heavy = {'torch', 'zarr', 'pydantic', 'typer', 'stages'} & set(sys.modules)\n"
        "    yield {'bad': np.array(len(bad)), 'heavy': np.array(len(heavy))}\n"
        "def load(settings, device):\n  return A()\n"
    )
    with Worker("paths", PYTHON, {}, scorer=str(adapter), limits=Limits(**QUICK)) as running:
        (found,) = running.measure(items(0))
    assert isinstance(found, dict)
    assert (int(found["bad"]), int(found["heavy"])) == (0, 0)


def test_the_protocol_costs_less_than_5_percent_of_100_candidates() -> None:
    """Counted in processor time, which other work on this machine does not change; the stage's own is in it."""
    candidates = [
        Item(np.random.default_rng(i).integers(0, 9, (17, 40, 64, 3), np.uint8)) for i in range(100)
    ]
    for item in candidates:
        item.video_FHW3[0, 0, 0, 0] = double.FINE
    own = 0.03  # seconds an item, about what the embedded pose network takes; a real scorer takes far more
    with worker(seconds=own) as running:
        running.start()
        before = time.process_time()
        outcomes = running.measure(candidates)
        stage = time.process_time() - before
        assert not any(isinstance(outcome, Failed) for outcome in outcomes)
        spent = running.seconds["all_cpu"] + stage
    assert running.seconds["all_cpu"] >= 100 * own
    assert spent < 1.05 * 100 * own, f"{100 * (spent / (100 * own) - 1):.1f} % over calling it in-process"
