"""The identity of weights follows their bytes; the memory of digests only saves time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.scorers.worker import weights
from pipeline.scorers.worker.weights import digest_weights


def test_digest_follows_names_and_bytes_and_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, cache = tmp_path / "w", tmp_path / "home" / "digests.json"
    (folder / "base").mkdir(parents=True)
    (folder / "a.pth").write_bytes(b"1")
    (folder / "base" / "config.json").write_text("{}")
    first = digest_weights(folder, ("a.pth", "base/*.json"), cache)
    assert len(json.loads(cache.read_text())) == 2
    monkeypatch.setattr(weights, "_digest", lambda path: pytest.fail(f"{path} was read again"))
    assert digest_weights(folder, ("a.pth", "base/*.json"), cache) == first
    monkeypatch.undo()
    (folder / "a.pth").write_bytes(b"22")
    assert digest_weights(folder, ("a.pth", "base/*.json"), cache) != first
    (folder / "a.pth").write_bytes(b"1")
    cache.write_text("damaged")
    assert digest_weights(folder, ("a.pth", "base/*.json"), cache) == first
    assert digest_weights(folder, ("a.pth",)) != first


def test_missing_weights_have_no_identity(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"a\.pth: is missing"):
        digest_weights(tmp_path, ("a.pth",))
