"""Stores under the accidents they exist for: kills, flipped bytes, lost files, changed inputs, full disks, shards."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.digests import digest_tree
from pipeline.errors import DataError, StorageError
from pipeline.stores import ArraySpec, GroupStore, Shard, repair, to_array, verify
from tests.pipeline.store_content import ARRAYS, GROUPS, KEYS, content, fill, prepare

ROOT = Path(__file__).parents[2]


def test_round_trip_and_nothing_is_a_silent_zero(tmp_path: Path) -> None:
    store = fill(tmp_path / "a.zarr")
    assert verify(store) == []
    for index in range(GROUPS):
        arrays, record = content(index)
        for name, value in arrays.items():
            np.testing.assert_array_equal(store.read(index, name), value)
        stored = store.record(index)
        assert set(stored.pop("sha256")) == set(arrays)
        assert stored == {"key": KEYS[index], "index": index, **record}
        assert all(path.exists() for path in store.group_files(index))  # the all-zero group too


@settings(max_examples=20, deadline=None)
@given(
    dtype=st.sampled_from(["float16", "float32", "bfloat16", "uint8"]),
    shape=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    per_candidate=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_shape_and_dtype_comes_back_bit_for_bit(
    dtype: str, shape: list[int], per_candidate: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(shape, generator=generator) * 100
    tensor = tensor.abs().to(torch.uint8) if dtype == "uint8" else tensor.to(getattr(torch, dtype))
    with tempfile.TemporaryDirectory() as folder:
        spec = ArraySpec("x", tuple(shape), dtype, per_candidate)
        store = GroupStore.prepare(
            Path(folder) / "s.zarr", kind="x", arrays=[spec], keys=["a", "b"], inputs={}
        )
        store.write(1, {"x": to_array(tensor, dtype)}, {})
        back = store.read_tensor(1, "x")
        assert back.dtype == tensor.dtype
        assert torch.equal(back, tensor)
        assert store.pending() == [0]


def test_resharding_gives_identical_bytes(tmp_path: Path) -> None:
    fill(tmp_path / "one.zarr")
    for part in (3, 1, 4, 2):
        fill(tmp_path / "four.zarr", Shard(part, 4))
    assert digest_tree(tmp_path / "one.zarr") == digest_tree(tmp_path / "four.zarr")


def test_same_inputs_resume_and_other_inputs_start_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.zarr"
    prepare(path).write(2, *content(2))
    assert prepare(path).pending() == [0, 1, 3, 4, 5]
    store = prepare(path, {"steps": 6})
    assert store.pending() == list(range(GROUPS))
    assert "inputs.steps: 5 -> 6" in caplog.text or "steps: 5 -> 6" in caplog.text


def test_unfinished_groups_cannot_be_read(tmp_path: Path) -> None:
    store = prepare(tmp_path / "a.zarr")
    with pytest.raises(DataError, match="group 0 .* is not finished"):
        store.read(0, "frames")
    with pytest.raises(DataError, match="6 of 6 groups are not finished"):
        store.content_digest()


@pytest.mark.parametrize("name", ["frames", "latents", "w2c"])
@pytest.mark.parametrize("accident", ["flip", "truncate", "delete"])
def test_damage_is_found_by_reading_and_by_verify_and_can_be_repaired(
    tmp_path: Path, name: str, accident: str
) -> None:
    store = fill(tmp_path / "a.zarr")
    reference = digest_tree(tmp_path / "a.zarr")
    path = store.array_path(3, name)
    data = bytearray(path.read_bytes())
    if accident == "flip":
        data[len(data) // 3] ^= 0x10
        path.write_bytes(bytes(data))
    elif accident == "truncate":
        path.write_bytes(bytes(data[:-7]))
    else:
        path.unlink()
    problems = verify(store)
    assert [(problem.kind, problem.index) for problem in problems] == [("damaged", 3)]
    assert "wcpipe verify --repair" in problems[0].detail
    if accident != "delete":  # a lost file reads as the fill value in zarr: that is what the mark is for
        with pytest.raises(DataError, match="group 3"):
            store.read(3, name)
    assert repair(store, problems) == [3]
    assert store.pending() == [3]
    assert verify(fill(tmp_path / "a.zarr")) == []
    assert digest_tree(tmp_path / "a.zarr") == reference


def test_other_valid_data_is_told_apart(tmp_path: Path) -> None:
    """A shard that is whole and valid but another one's: its own checksums cannot tell, and marks must."""
    one, two = fill(tmp_path / "a.zarr"), fill(tmp_path / "b.zarr")
    assert one.content_digest() == two.content_digest()
    arrays, record = content(2)
    arrays["w2c"] = arrays["w2c"] + 1
    two.write(2, arrays, record)
    assert one.content_digest() != two.content_digest()
    assert one.done()[2] != two.done()[2]
    two.array_path(0, "w2c").write_bytes(two.array_path(3, "w2c").read_bytes())
    assert [(problem.kind, problem.index) for problem in verify(two)] == [("damaged", 0)]


def test_damaged_and_foreign_records_and_files_are_found(tmp_path: Path) -> None:
    store = fill(tmp_path / "a.zarr")
    store.record_path(0).write_text("{")
    store.record_path(1).write_bytes(store.record_path(2).read_bytes())
    (store.path / "frames" / "c.9.0.0.0.0.0").write_bytes(b"x")
    found = {(problem.kind, problem.index) for problem in verify(store)}
    assert found == {("damaged", 0), ("foreign", 1), ("foreign", -1)}
    assert repair(store, verify(store)) == [0, 1]
    assert {problem.kind for problem in verify(store)} == {"missing"}
    assert verify(fill(store.path)) == []
    assert digest_tree(store.path) == digest_tree(fill(tmp_path / "b.zarr").path)


def test_foreign_folders_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"b\.zarr: is missing"):
        GroupStore.open(tmp_path / "b.zarr")
    (tmp_path / "c.zarr").mkdir()
    (tmp_path / "c.zarr" / "zarr.json").write_text('{"zarr_format": 3')
    with pytest.raises(DataError, match=r"c\.zarr: is not a wcpipe store"):
        GroupStore.open(tmp_path / "c.zarr")


def test_equal_keys_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="same key"):
        GroupStore.prepare(tmp_path / "a.zarr", kind="x", arrays=ARRAYS, keys=["a", "a"], inputs={})


WRITER = """
from pathlib import Path
from tests.pipeline.store_content import fill
fill(Path({path!r}))
"""


def test_killed_again_and_again_it_still_ends_with_the_same_bytes(tmp_path: Path) -> None:
    """kill -9 at random moments, including while the store is made; what is left never reads as finished and wrong."""
    fill(tmp_path / "clean.zarr")
    path = tmp_path / "killed.zarr"
    code = WRITER.format(path=str(path))
    dice = random.Random(0)
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=ROOT)
    whole = time.monotonic() - start
    killed = 0
    for _ in range(8):
        for index in dice.sample(range(GROUPS), 3):
            prepare(path).invalidate(index)
        process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
        time.sleep(whole * dice.uniform(0.5, 1.0))
        process.send_signal(signal.SIGKILL)
        hit = process.wait() == -signal.SIGKILL
        killed += hit
        whole *= 1 if hit else 0.7  # it had finished: the machine is faster now than when it was timed
        assert {problem.kind for problem in verify(prepare(path))} <= {"missing"}
    assert killed > 0
    store = fill(path)
    store.sweep()
    assert verify(store) == []
    assert digest_tree(path) == digest_tree(tmp_path / "clean.zarr")


def test_sweep_removes_what_a_killed_writer_left(tmp_path: Path) -> None:
    store = fill(tmp_path / "a.zarr")
    (store.path / "frames" / "c.0.0.abc.partial").write_bytes(b"half")
    (store.path / "records" / ".00000.json.abc.tmp").write_bytes(b"half")
    assert store.sweep() == 2
    assert store.sweep() == 0
    assert verify(store) == []


FULL = """
import resource, signal, sys
from pathlib import Path
from tests.pipeline.store_content import prepare, content
from pipeline.errors import StorageError
store = prepare(Path({path!r}))
store.write(0, *content(0))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (256, 256))  # the kernel refuses larger files: a full disk without a mount
try:
    store.write(2, *content(2))
except StorageError as error:
    print(error)
    sys.exit(error.exit_code)
"""


def test_a_full_disk_is_one_clear_line_and_keeps_what_was_finished(tmp_path: Path) -> None:
    code = FULL.format(path=str(tmp_path / "a.zarr"))
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert result.returncode == StorageError.exit_code, result.stderr
    assert "a.zarr" in result.stdout
    assert "run the same command again" in result.stdout
    store = prepare(tmp_path / "a.zarr")
    assert store.pending() == [1, 2, 3, 4, 5]
    store.sweep()
    assert {problem.kind for problem in verify(store)} == {"missing"}
