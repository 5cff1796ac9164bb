"""`wcpipe verify`: what it lists, and what its exit code says of stores that are not finished."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.errors import DataError
from pipeline.stores import Shard
from stages.verify import run_verify
from tests.pipeline.store_content import GROUPS, fill


def test_unfinished_groups_are_counted_and_with_complete_listed(tmp_path: Path) -> None:
    fill(tmp_path / "a.zarr", Shard(1, 2))
    assert run_verify([tmp_path])["missing"] == GROUPS // 2
    with pytest.raises(
        DataError, match=r"1 stores are not finished.*\n.*a\.zarr: missing: 3 of 6: groups 3-5"
    ):
        run_verify([tmp_path], complete=True)
    fill(tmp_path / "a.zarr")
    assert run_verify([tmp_path], complete=True)["missing"] == 0


def test_repair_sweeps_what_killed_writers_left(tmp_path: Path) -> None:
    store = fill(tmp_path / "a.zarr")
    left = store.path / "frames" / "c.0.0.0.0.0.0.partial"
    left.write_bytes(b"x")
    assert run_verify([tmp_path], repair=True)["deleted"] == 1
    assert not left.exists()
