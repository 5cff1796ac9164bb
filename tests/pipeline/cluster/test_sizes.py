"""The table of sizes against real stores, and the bound on files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.cluster.sizes import PAPER, Scale, epoch, frames_until, table, totals
from pipeline.groups import rollout_arrays
from pipeline.stores import ArraySpec, GroupStore, block_size
from pipeline.worlds.base import WorldSpec


@pytest.mark.parametrize(("prompts", "clip"), [(3, 1), (70, 2)])
def test_a_rollout_store_has_the_size_and_the_files_that_the_table_says(
    tmp_path: Path, prompts: int, clip: int
) -> None:
    scale = Scale(prompts=prompts, candidates=2, clip=clip, channels=2, latent=(1, 2), frame=(16, 32))
    spec = WorldSpec(latent_shape=(2, 1, 2), frame_size=(16, 32), stride=4)
    arrays = rollout_arrays(spec, clip, 2, "float16")
    keys = [str(index) for index in range(prompts)]
    store = GroupStore.prepare(
        tmp_path / "r.zarr", kind="r", arrays=arrays, keys=keys, inputs={}, block=block_size(prompts)
    )
    for index in range(prompts):
        values = {array.name: np.ones(array.shape, array.stored_dtype) for array in arrays}
        store.write(index, values, {})
    rows = {row.array: row for row in epoch(scale) if row.artifact == "rollouts.zarr"}
    assert sum(path.is_file() for path in store.path.rglob("*")) == sum(row.files for row in rows.values())
    for array in arrays:
        size = np.prod(array.shape) * array.stored_dtype.itemsize
        assert rows[array.name].bytes_group == size


def test_paper_scale() -> None:
    assert frames_until(16, 4) == 253
    assert all(totals(scale)["all"][1] <= 1200 for scale in PAPER if scale.prompts == 1000)
    assert totals(Scale())["rollouts.zarr"][0] == pytest.approx(
        64 * 16 * (16 * 480 * 832 * 3 + 48 * 4 * 30 * 52 * 2) / 1e9, rel=1e-4
    )
    assert "| rollouts.zarr | frames | 16 x 16 x 480 x 832 x 3 uint8 |" in table(epoch(Scale()))


@pytest.mark.parametrize("prompts", [1000, 1500, 4000])
def test_large_epochs_stay_under_1200_files(prompts: int) -> None:
    assert totals(Scale(prompts=prompts))["all"][1] <= 1200


@pytest.mark.slow
@pytest.mark.timeout(1200)  # the advantages are one block: each write rewrites it, so a thousand take minutes
def test_a_real_epoch_of_a_thousand_groups_has_the_files_that_the_table_says(tmp_path: Path) -> None:
    """The stores of an epoch with as many arrays as the real ones, of a few bytes each."""
    scale, groups = Scale(prompts=1000), 1000
    block = block_size(groups)
    keys = [str(index) for index in range(groups)]
    for name in (
        "prefixes.zarr",
        "rollouts.zarr",
        "scores.zarr/pose",
        "scores.zarr/quality",
        "advantages.zarr",
    ):
        rows = [row for row in epoch(scale) if row.artifact == name and row.array != "records, done"]
        count = scale.scores if name == "advantages.zarr" else len(rows)
        arrays = [ArraySpec(f"a{number}", (2,), "uint8") for number in range(count)]
        own = groups if name == "advantages.zarr" else block
        store = GroupStore.prepare(tmp_path / name, kind=name, arrays=arrays, keys=keys, inputs={}, block=own)
        for index in store.take(store.pending()):
            store.write(index, {array.name: np.full(2, index % 256, np.uint8) for array in arrays}, {})
        store.sweep()
        assert store.pending() == []
    files = sum(path.is_file() and not path.name.startswith(".") for path in tmp_path.rglob("*"))
    expected, policy = totals(scale)["all"][1], totals(scale)["policy/"][1]
    assert files == expected - policy
    assert files <= 1200
