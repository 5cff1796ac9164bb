"""Atomic files: all or nothing, whatever happens while they are written."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline import files
from pipeline.errors import DataError


def test_json_round_trip_and_named_errors(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.json"
    files.write_json(path, {"b": 1, "a": None})
    assert files.read_json(path, "") == {"b": 1, "a": None}
    with pytest.raises(ValueError, match="JSON compliant|Out of range"):
        files.write_json(path, {"x": float("nan")})
    assert files.read_json(path, "") == {"b": 1, "a": None}
    path.write_text("{")
    with pytest.raises(DataError, match="do this"):
        files.read_json(path, "do this")
    with pytest.raises(DataError, match="is missing; do that"):
        files.read_json(tmp_path / "none.json", "do that")


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "policy"
    with files.replace_folder(path) as folder:
        (folder / "a").write_text("1")
    with pytest.raises(RuntimeError), files.replace_folder(path) as folder:
        (folder / "b").write_text("2")
        raise RuntimeError
    assert [child.name for child in path.iterdir()] == ["a"]
    assert [child.name for child in tmp_path.iterdir()] == ["policy"]
    (tmp_path / ".policy.dead.tmp").mkdir()
    with files.replace_folder(path) as folder:
        (folder / "c").write_text("3")
    assert [child.name for child in path.iterdir()] == ["c"]
    assert [child.name for child in tmp_path.iterdir()] == ["policy"]
