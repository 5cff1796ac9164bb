"""Stores of blocks: several groups in one file, no group lost by a kill, and never two writers in one shard."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.digests import digest_tree
from pipeline.errors import UsageError
from pipeline.stores import ArraySpec, GroupStore, Shard, block_size, repair, verify
from pipeline.stores.packed import STAGED, PackedStore
from tests.pipeline.store_content import ARRAYS, content

ROOT = Path(__file__).parents[2]
GROUPS, BLOCK = 7, 3


def prepare(path: Path, groups: int = GROUPS, block: int = BLOCK) -> GroupStore:
    keys = [f"group{index}" for index in range(groups)]
    return GroupStore.prepare(path, kind="rollouts", arrays=ARRAYS, keys=keys, inputs={}, block=block)


def fill(path: Path, shard: Shard = Shard()) -> GroupStore:
    store = prepare(path)
    for index in store.take(store.pending(shard)):
        store.write(index, *content(index))
    return store


def test_a_packed_store_reads_as_the_same_groups(tmp_path: Path) -> None:
    store = fill(tmp_path / "a.zarr")
    assert isinstance(store, PackedStore)
    assert verify(store) == []
    assert not (store.path / STAGED).exists()
    for index in range(GROUPS):
        arrays, record = content(index)
        for name, value in arrays.items():
            np.testing.assert_array_equal(store.read(index, name), value)
        assert store.record(index)["word"] == record["word"]
    files = [path for path in store.path.rglob("*") if path.is_file() and path.name != "zarr.json"]
    assert len(files) == 3 * (len(ARRAYS) + 2)  # three blocks: a file an array, the records, the marks
    assert store.content_digest() == fill(tmp_path / "b.zarr").content_digest()


@pytest.mark.parametrize("groups", [1000, 1001, 4000])
def test_a_thousand_groups_make_at_most_1200_files(tmp_path: Path, groups: int) -> None:
    """All stores of an epoch together: 21 arrays, records and marks of prefixes, rollouts and two scorers."""
    block = block_size(groups)
    assert groups // block <= 48
    arrays = [ArraySpec(name, (1,), "uint8") for name in "ab"]
    store = GroupStore.prepare(
        tmp_path / "s.zarr",
        kind="x",
        arrays=arrays,
        keys=[str(index) for index in range(groups)],
        inputs={},
        block=block,
    )
    for index in range(2 * block):
        store.write(index, {name: np.ones(1, np.uint8) for name in "ab"}, {})
    a_block = sum(path.name.startswith(("c.", "000")) for path in store.path.rglob("*")) / 2
    assert a_block == len(arrays) + 2
    epoch = (7 + 2 + 2 + 1) + 4 * 2  # arrays and, for each of four stores, records and marks
    assert -(-groups // block) * epoch <= 1000  # the rest is for advantages, policy, metrics and zarr.json


@pytest.mark.parametrize("landmark", ["staged", "packing", "marked"])
def test_killed_at_each_step_of_packing_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, landmark: str
) -> None:
    class Kill(BaseException):
        pass

    expected = digest_tree(fill(tmp_path / "clean.zarr").path)
    store = prepare(tmp_path / "killed.zarr")
    for index in range(BLOCK - 1):
        store.write(index, *content(index))

    def die(*args: object, **kwargs: object) -> None:
        raise Kill

    target = {
        "staged": ("pipeline.stores.packed.PackedStore._pack", die),
        "packing": ("pipeline.stores.packed.files.write_json", die),
        "marked": ("pipeline.stores.packed.PackedStore._tidy", die),
    }[landmark]
    with monkeypatch.context() as patch:
        patch.setattr(*target)
        with pytest.raises(Kill):
            store.write(BLOCK - 1, *content(BLOCK - 1))
    store = GroupStore.open(store.path)
    assert store.pending() == list(range(BLOCK, GROUPS))
    np.testing.assert_array_equal(store.read(0, "w2c"), content(0)[0]["w2c"])
    store = fill(store.path)
    store.sweep()
    assert verify(store) == []
    assert digest_tree(store.path) == expected


@pytest.mark.parametrize("accident", ["flip", "lost", "records"])
def test_damage_in_a_block_costs_as_few_groups_as_it_can(tmp_path: Path, accident: str) -> None:
    store = fill(tmp_path / "a.zarr")
    expected = digest_tree(store.path)
    path = store.record_path(4) if accident == "records" else store.array_path(4, "frames")
    data = bytearray(path.read_bytes())
    if accident == "flip":  # somewhere in a chunk of the first group of the block: its neighbours are whole
        data[40] ^= 0x10
        path.write_bytes(bytes(data))
    else:
        path.unlink()
    found = verify(store)
    assert [problem.kind for problem in found] == ["damaged"] * (1 if accident == "flip" else BLOCK)
    redone = repair(store, found)
    assert store.pending() == redone == ([3] if accident == "flip" else [3, 4, 5])
    store = fill(store.path)
    assert verify(store) == []
    assert digest_tree(store.path) == expected


def test_a_damaged_staged_file_is_made_again(tmp_path: Path) -> None:
    expected = digest_tree(fill(tmp_path / "clean.zarr").path)
    store = prepare(tmp_path / "a.zarr")
    for index in (0, 1):
        store.write(index, *content(index))
    staged = sorted((store.path / STAGED).glob("*.npz"))
    staged[0].write_bytes(staged[0].read_bytes()[:-300])
    data = bytearray(staged[1].read_bytes())
    data[len(data) // 2] ^= 0x10
    staged[1].write_bytes(bytes(data))
    for _ in range(3):  # what is found damaged when the block is packed is pending again
        store = fill(store.path)
    assert verify(store) == []
    assert digest_tree(store.path) == expected


@given(groups=st.integers(1, 300), count=st.integers(1, 40))
def test_parts_are_whole_blocks_and_cover_all_groups_once(groups: int, count: int) -> None:
    for block in {1, 4, block_size(groups)}:
        parts = [Shard(index, count).part(groups, block) for index in range(1, count + 1)]
        assert [group for part in parts for group in part] == list(range(groups))
        assert all(part.start % block == 0 for part in parts if part)


def test_parts_that_would_share_a_shard_are_refused() -> None:
    assert Shard(only=(3, 7)).part(7, 3) == range(3, 7)
    with pytest.raises(UsageError, match="2:6 would share a zarr shard of 3 groups .*: write 0:6"):
        Shard(only=(2, 6)).part(9, 3)
    with pytest.raises(UsageError, match="there are 9 groups"):
        Shard(only=(3, 12)).part(9, 3)


WORKER = """
import sys, time
from pathlib import Path
from tests.pipeline.test_packed_stores import prepare
from tests.pipeline.store_content import content
store = prepare(Path(sys.argv[1]), block=int(sys.argv[3]))
print("ready", flush=True)
sys.stdin.readline()
for index in store.take(store.pending()):
    store.write(index, *content(index))
    print(index, flush=True)
    time.sleep(float(sys.argv[2]))
store.sweep()
"""


def worker(path: Path, pause: float, block: int) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", WORKER, str(path), str(pause), str(block)]
    return subprocess.Popen(arguments, cwd=ROOT, stdin=-1, stdout=-1, text=True, bufsize=1)


@pytest.mark.parametrize("block", [1, BLOCK])
def test_two_tasks_with_the_same_part_share_it(tmp_path: Path, block: int) -> None:
    path = tmp_path / "a.zarr"
    both = [worker(path, 0.05, block) for _ in range(2)]
    for process in both:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    outputs = []
    for process in both:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in both:
        outputs.append(process.communicate(timeout=60)[0].split())
        assert process.returncode == 0
    assert sorted(int(index) for output in outputs for index in output) == list(range(GROUPS))
    assert verify(prepare(path, block=block)) == []


def test_a_claim_ends_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    process = worker(path, 100, BLOCK)
    assert process.stdout is not None
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "ready\n"
    assert process.stdout.readline() == "0\n"
    store, waited = prepare(path), [0.0]
    taken = store.take(store.pending(), lambda: waited.append(time.monotonic()))
    others = [next(taken) for _ in range(4)]
    assert others == [3, 4, 5, 6]  # the block of the other process comes last
    for index in others:
        store.write(index, *content(index))
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert list(taken) == [1, 2]
    process.communicate()


@pytest.mark.slow
def test_killed_again_and_again_a_packed_store_ends_with_the_same_bytes(tmp_path: Path) -> None:
    expected = digest_tree(fill(tmp_path / "clean.zarr").path)
    path, dice = tmp_path / "killed.zarr", random.Random(0)
    for _ in range(6):
        process = worker(path, 0.01, BLOCK)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        process.stdout.readline()
        time.sleep(dice.uniform(0, 0.2))
        process.kill()
        process.communicate()
        store = prepare(path)
        assert {problem.kind for problem in verify(store)} <= {"missing"}
        store.invalidate(dice.randrange(GROUPS))
    store = fill(path)
    store.sweep()
    assert digest_tree(path) == expected


@pytest.mark.parametrize("groups", [8, 32])
def test_writing_a_group_asks_for_a_bounded_number_of_marks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: int
) -> None:
    """Asking for every member of the block at each write made a thousand groups cost a million reads."""
    arrays = [ArraySpec("a", (2,), "uint8")]
    keys = [str(index) for index in range(groups)]
    store = GroupStore.prepare(tmp_path / "s.zarr", kind="k", arrays=arrays, keys=keys, inputs={}, block=groups)
    asked: list[int] = []
    mark = GroupStore._mark
    monkeypatch.setattr(GroupStore, "_mark", lambda self, index: asked.append(index) or mark(self, index))
    for index in range(groups - 1):  # the last one packs the block and reads them all
        store.write(index, {"a": np.full(2, index, np.uint8)}, {})
    assert len(asked) <= 4 * groups
