"""`wcpipe preview` on a tiny random base: candidates in order of their advantage, and a case before and after."""

from __future__ import annotations

import shutil
from pathlib import Path

import av
import numpy as np
import pytest

from pipeline import config
from pipeline.errors import DataError, UsageError
from pipeline.stores import GroupStore
from stages import preview
from stages.common import EpochPaths
from stages.preview import run_case, run_group
from stages.run import run_epochs
from tests.conftest import TINY

SMALL = ("evaluate.basic=1", "evaluate.compound=1", "evaluate.clips=1")


@pytest.fixture(scope="module")
def run(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[config.Params, Path]:
    """(params, root) of two finished epochs: a first and a second clip."""
    folder = tmp_path_factory.mktemp("preview")
    (folder / "params.yaml").write_text(TINY.format(weights=tiny_base))
    params = config.load(folder / "params.yaml", SMALL)
    run_epochs(params, folder / "root")
    return params, folder / "root"


def frames_of(path: str) -> int:
    with av.open(path) as film:
        return sum(1 for _ in film.decode(video=0))


@pytest.mark.parametrize(("epoch", "frames"), [("e001", 4), ("e002", 8)])
def test_candidates_stand_in_the_order_of_their_advantage(
    run: tuple[config.Params, Path], epoch: str, frames: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, root = run
    shown: list[str] = []
    write = preview._write

    def noted(root: Path, name: str, rows: list, keys: list[str], fps: float) -> dict:
        shown.extend(row.caption for row in rows)
        assert len(keys) == frames  # the shared past is shown too
        return write(root, name, rows, keys, fps)

    monkeypatch.setattr(preview, "_write", noted)
    made = run_group(params, epoch, root, 0, 1)
    advantage = GroupStore.open(EpochPaths(root, epoch).advantages).read(0, "advantage")
    best, worst = int(np.argmax(advantage)), int(np.argmin(advantage))
    assert shown[0].startswith(f"candidate {best}: advantage {advantage[best]:+.2f}")
    assert shown[-1].startswith(f"candidate {worst}: ")
    assert "action_fine" in shown[0]
    assert frames_of(made["mp4"]) == frames
    assert Path(made["png"]).stat().st_size > 1000


def test_a_case_is_shown_under_its_true_view(run: tuple[config.Params, Path]) -> None:
    params, root = run
    made = run_case(params, "e002", root, "e000", "compound", 0)
    assert frames_of(made["mp4"]) == 4
    assert made["word"].count("+")
    with pytest.raises(UsageError, match="--case 7: there are the compound cases 0 to 0"):
        run_case(params, "e002", root, "e000", "compound", 7)


def test_what_is_not_there_is_named(run: tuple[config.Params, Path], tmp_path: Path) -> None:
    params, root = run
    with pytest.raises(UsageError, match="--group 99: e001 has the groups 0 to"):
        run_group(params, "e001", root, 99, 1)
    copied = tmp_path / "root"
    shutil.copytree(root, copied)
    shutil.rmtree(EpochPaths(copied, "e001").advantages)
    with pytest.raises(DataError, match="wcpipe advantage --epoch e001"):
        run_group(params, "e001", copied, 0, 1)
    for both in ({"epoch": "e001", "after": "e002"}, {}):
        with pytest.raises(UsageError, match="needs either --epoch EPOCH"):
            preview.command(**both)
