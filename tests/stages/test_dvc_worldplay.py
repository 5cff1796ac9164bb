"""`dvc repro` of the committed WorldPlay experiments on tiny random worlds: import, encode and all five stages."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from pipeline import config
from pipeline.stores import GroupStore
from tests.stages.test_dvc import ROOT, artifacts, dvc, repro
from tests.tiny_worlds import FRAME, Tiny, encode, import_base, materials

WORLDS = ("worldplay-5b", "worldplay-8b")
CPU_LIMIT = 90.0  # seconds of all stages of one world; both together may cost CI three minutes
SMALL: dict[str, Any] = {
    "words": {"hold": [1, 3]},
    "target": {"n_min": 1, "n_max": 2},
    "sampler": {"steps": 2},
    "prefix": {"groups": 2},
    "rollout": {"candidates": 4},
    "rewards": {
        "action": {"scorer": "pose", "scale": "world"},
        "quality": {"scorer": "critic"},
        "closure": {"scorer": "lucas-kanade"},
    },
    "advantage": {"best_of_n": 2},
    "update": {"timesteps": 1, "accumulation": 2},
}


def plain(path: Path) -> Any:
    return YAML(typ="safe", pure=True).load(path.read_text())


@pytest.mark.parametrize("world", WORLDS)
def test_the_experiments_are_the_repositorys_own_stages(world: str) -> None:
    """Two copies of a file drift apart unless something compares them."""
    own, shared = (
        plain(ROOT / "experiments" / world / "dvc.yaml")["stages"],
        plain(ROOT / "dvc.yaml")["stages"],
    )
    assert set(shared) - set(own) == {"evaluate", "report"}
    assert own["prefix"]["do"]["deps"].pop(0) == "${world.scenes}"
    shared["base"]["params"].remove("pretrain")
    assert own == {name: shared[name] for name in own}
    params = config.load(ROOT / "experiments" / world / "params.yaml")
    assert params.world.name == world
    assert params.sampler.preset is not None


def project(folder: Path, tiny: Tiny, scorers: Path) -> Path:
    """A working folder with the committed files of one world's experiment, made small."""
    shutil.copyfile(ROOT / "experiments" / tiny.name / "dvc.yaml", folder / "dvc.yaml")
    shutil.copytree(scorers, folder / "scorers")
    yaml = YAML()
    params = yaml.load((ROOT / "experiments" / tiny.name / "params.yaml").read_text())
    params["world"].update(
        weights=str(tiny.base.relative_to(folder)), scenes=str(tiny.scenes.relative_to(folder))
    )
    params["score"]["weights"] = "scorers"
    for section, values in SMALL.items():
        params[section].update(values)
    params["update"]["params"]["rank"] = 4
    for epoch in list(params["epochs"])[2:]:
        del params["epochs"][epoch]
    with (folder / "params.yaml").open("w") as file:
        yaml.dump(params, file)
    dvc(folder, "init", "--no-scm").wait()
    return folder


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("world", WORLDS)
def test_a_tiny_world_runs_the_whole_experiment(world: str, tiny_base: Path, tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    tiny = materials(world, tmp_path)
    import_base(tiny)
    encode(tiny)
    folder = project(tmp_path, tiny, tiny_base)
    said = repro(folder)
    assert "Running stage 'update@e002'" in said
    assert "WARNING: " in said  # few steps under NFT
    assert {"e002/policy", "e002/rollouts.zarr", "e001/scores.zarr"} <= set(artifacts(folder))
    height, width = FRAME[world]
    for epoch, frames in (("e001", 13), ("e002", 16)):  # clip 1, then clip 2, of four frames a latent
        rollouts = GroupStore.open(folder / "artifacts" / epoch / "rollouts.zarr").require_complete("")
        assert rollouts.read(0, "frames").shape == (4, frames, height, width, 3)
        assert rollouts.record(0)["reasons"] == {}
    assert "Data and pipelines are up to date" in repro(folder)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"{world}: {spent:.0f} s of CPU time in all stages")
    assert spent < CPU_LIMIT
