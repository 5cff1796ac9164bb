"""Environments are made from requirements, also without a network, and count only when they are whole."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from pipeline.errors import DependencyError, UsageError
from pipeline.scorers import environments
from pipeline.scorers.environments import ScorerAbout


def wheel(folder: Path, name: str, version: str = "1.0", code: str = "value = 1\n") -> None:
    """A wheel of one module, written by hand."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}.py", code)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A scorer `demo` whose package `demoscorer` and shared "torch" lie in a folder of wheels."""
    requirements = tmp_path / "requirements"
    requirements.mkdir()
    (requirements / "demo.txt").write_text("demoscorer==1.0\n")
    (requirements / "torch.txt").write_text("sharedtorch==1.0\n")
    about = ScorerAbout("demo", "nothing", ("demoscorer",), "0 GB", "none", ())
    monkeypatch.setattr(environments, "REQUIREMENTS", requirements)
    monkeypatch.setitem(environments.ABOUT, "demo", about)
    monkeypatch.setenv("WCPIPE_SCORERS", str(tmp_path / "home"))
    wheel(tmp_path / "wheels", "sharedtorch")
    wheel(tmp_path / "wheels", "demoscorer", code="import sharedtorch\n")
    return tmp_path


@pytest.mark.slow
def test_an_environment_is_made_offline_shares_torch_and_is_made_once(demo: Path) -> None:
    said: list[str] = []
    found = environments.install("demo", said.append, find_links=demo / "wheels")
    assert found["packages"]["demoscorer"] == "1.0"
    assert "sharedtorch" in found["packages"]  # seen through the .pth file, installed once
    assert not list((demo / "home" / "demo").rglob("sharedtorch.py"))
    assert environments.is_current("demo")
    said.clear()
    assert environments.install("demo", said.append) == found  # without wheels: nothing is installed again
    assert said == [f"demo: is installed ({demo / 'home' / 'demo'})"]
    (environments.REQUIREMENTS / "demo.txt").write_text("demoscorer==1.0  # changed\n")
    assert not environments.is_current("demo")


@pytest.mark.slow
def test_what_cannot_be_installed_or_imported_leaves_no_environment(demo: Path) -> None:
    (environments.REQUIREMENTS / "demo.txt").write_text("demoscorer==2.0\n")
    with pytest.raises(
        DependencyError,
        match=r"demo: pip install failed.*No matching distribution found for demoscorer==2\.0",
    ):
        environments.install("demo", print, find_links=demo / "wheels")
    with pytest.raises(DependencyError, match="no environment of demo; run `wcpipe scorers install demo`"):
        environments.record("demo")
    wheel(demo / "wheels", "demoscorer", "2.0", "raise OSError('libcudart.so.12: cannot open')\n")
    with pytest.raises(DependencyError, match="demo: import failed .*libcudart"):
        environments.install("demo", print, find_links=demo / "wheels")
    assert not environments.is_current("demo")


def test_offline_a_git_address_becomes_a_name(tmp_path: Path) -> None:
    wanted = environments.without_addresses(
        environments.REQUIREMENTS / "cotracker.txt", tmp_path / "offline.txt"
    )
    lines = [line for line in wanted.read_text().splitlines() if line and not line.startswith("#")]
    assert lines == ["cotracker"]
    plain = environments.without_addresses(environments.REQUIREMENTS / "hpsv3.txt", tmp_path / "offline.txt")
    assert "hpsv3==1.0.0" in plain.read_text()


def test_an_existing_environment_is_used_if_its_package_can_be_imported(
    demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DependencyError, match="demo: import failed .*No module named 'demoscorer'"):
        environments.register("demo", Path(sys.executable), print)
    with pytest.raises(DependencyError, match="python: is missing"):
        environments.register("demo", demo / "python", print)
    numpy = ScorerAbout("demo", "nothing", ("numpy",), "0 GB", "none", ())
    monkeypatch.setitem(environments.ABOUT, "demo", numpy)
    assert environments.register("demo", Path(sys.executable), print)["packages"]["numpy"]
    with pytest.raises(UsageError, match="unknown scorer 'hps'; known: hpsv3"):
        environments.about("hps")
