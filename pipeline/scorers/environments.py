"""Environments of the real scorers: what they are, how they are made, and where a worker's interpreter is.

Each scorer has a virtual environment of its own below `home()` (`.scorers/NAME`, tracked by nothing), made from
`requirements/NAME.txt`. They share one installation of torch, 5.5 GB: `.scorers/torch`, made from
`requirements/torch.txt` and shown to each environment by a .pth file, which pip and Python both understand. A record
written last says that an environment is whole and what is in it.

Nothing here is imported by a stage unless it needs a worker.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline import files
from pipeline.digests import digest_file, digest_of
from pipeline.errors import DependencyError, UsageError

REQUIREMENTS = Path(__file__).parents[2] / "requirements"
RECORD = "environment.json"
TORCH = "torch"
_PTH = "zz_shared_torch.pth"


@dataclass(frozen=True)
class Weights:
    """One download: where to put it below the scorer's weights folder, its page and its size."""

    into: str
    source: str
    size: str


@dataclass(frozen=True)
class ScorerAbout:
    """A real scorer: what it measures, what its environment costs, its licences and weights.

    `size` is what the environment takes beside the shared torch, as measured (spec scorers 0).
    """

    name: str
    measures: str
    modules: tuple[str, ...]
    size: str
    licence: str
    weights: tuple[Weights, ...]
    note: str = ""


ABOUT: dict[str, ScorerAbout] = {
    about.name: about
    for about in (
        ScorerAbout(
            "hpsv3",
            "visual quality",
            ("hpsv3.inference",),
            "0.9 GB",
            "code MIT; base model Apache-2.0",
            (
                Weights("HPSv3.safetensors", "MizzenAI/HPSv3 on the Hugging Face hub", "17 GB"),
                Weights(
                    "Qwen2-VL-7B-Instruct/",
                    "Qwen/Qwen2-VL-7B-Instruct on the Hugging Face hub, all files",
                    "17 GB",
                ),
            ),
            "17 GB of GPU memory",
        ),
        ScorerAbout(
            "depth-anything-3",
            "camera poses",
            ("depth_anything_3.api",),
            "0.9 GB",
            "code Apache-2.0; weights SMALL, BASE Apache-2.0; LARGE, GIANT and NESTED CC BY-NC 4.0 (non-commercial)",
            (
                Weights(
                    "config.json, model.safetensors",
                    "depth-anything/DA3-BASE on the Hugging Face hub",
                    "0.5 GB",
                ),
            ),
            "poses have no units: one scale is fitted a scene",
        ),
        ScorerAbout(
            "cotracker",
            "point tracks",
            ("cotracker.predictor",),
            "under 0.1 GB",
            "code and weights CC BY-NC 4.0 (non-commercial)",
            (Weights("scaled_offline.pth", "facebook/cotracker3 on the Hugging Face hub", "0.1 GB"),),
            "from its git repository: there is no such package on PyPI",
        ),
        ScorerAbout(
            "roma",
            "matches (evaluation)",
            ("romatch",),
            "0.7 GB",
            "code MIT; DINOv2 Apache-2.0",
            (
                Weights("roma_outdoor.pth", "releases of Parskatt/storage on GitHub, tag roma", "0.4 GB"),
                Weights(
                    "dinov2_vitl14_pretrain.pth",
                    "DINOv2's ViT-L/14 (facebookresearch/dinov2)",
                    "1.2 GB",
                ),
            ),
            "uses its own CUDA kernel only where `import local_corr` works",
        ),
    )
}


def home() -> Path:
    """Folder of the environments: $WCPIPE_SCORERS, else `.scorers` in the working folder."""
    return Path(os.environ.get("WCPIPE_SCORERS") or ".scorers")


def about(name: str) -> ScorerAbout:
    """Raises UsageError for a name that is none."""
    if name not in ABOUT:
        raise UsageError(f"unknown scorer {name!r}; known: {', '.join(ABOUT)}")
    return ABOUT[name]


def record(name: str) -> dict[str, Any]:
    """What `install` wrote: python, packages, requirements. Raises DependencyError naming the command that makes it."""
    about(name)
    path = home() / name / RECORD
    remedy = f"run `wcpipe scorers install {name}`"
    if not path.exists():
        raise DependencyError(f"{path.parent}: holds no environment of {name}; {remedy}")
    found = files.read_json(path, remedy)
    if not Path(found["python"]).exists():
        raise DependencyError(f"{found['python']}: is missing; {remedy}")
    return found


def is_current(name: str) -> bool:
    """Whether the environment is whole and was made from the requirements as they are now."""
    try:
        found = record(name)
    except DependencyError:
        return False
    return bool(found["requirements"] == requirements_digest(name))


def requirements_digest(name: str) -> str:
    """Identity of what an environment is made from."""
    return digest_of([digest_file(REQUIREMENTS / f"{part}.txt") for part in (name, TORCH)])


def packages_digest(name: str) -> str:
    """Identity of the packages in an environment, for what a score was made with. Raises DependencyError."""
    return digest_of(record(name)["packages"])


# ---------------------------------------------------------------- making them

Say = Callable[[str], None]


def install(
    name: str,
    say: Say,
    *,
    base: Path = Path(sys.executable),
    find_links: Path | None = None,
    shared_torch: bool = True,
) -> dict[str, Any]:
    """Make the environment of a scorer and return its record; one that is current is left alone.

    base          the interpreter it is made with
    find_links    install from this folder of wheels alone, without a network
    shared_torch  false: an installation of torch for this scorer alone
    Raises DependencyError with the installer's last words.
    """
    about(name)
    if is_current(name):
        say(f"{name}: is installed ({home() / name})")
        return record(name)
    folder = home() / name
    python = _venv(folder / "env", base, say)
    offline = [] if find_links is None else ["--no-index", "--find-links", str(find_links.resolve())]
    if shared_torch:
        shared = install_torch(say, base=base, find_links=find_links)
        _site_packages(python).joinpath(_PTH).write_text(f"{_site_packages(shared)}\n")
    else:
        _pip(python, ["-r", str(REQUIREMENTS / f"{TORCH}.txt"), *offline], f"{name}: torch", say)
    for options, path in _steps(name):
        wanted = path if find_links is None else without_addresses(path, folder / "offline.txt")
        _pip(python, [*options, "-r", str(wanted), *offline], name, say)
    return _finish(name, python, requirements_digest(name), say)


def register(name: str, python: Path, say: Say) -> dict[str, Any]:
    """Use an environment that exists already. Raises DependencyError when the package cannot be imported in it."""
    about(name)
    if not python.exists():
        raise DependencyError(f"{python}: is missing; give the interpreter of an environment with --python")
    return _finish(name, python.absolute(), requirements_digest(name), say)


def install_torch(say: Say, *, base: Path, find_links: Path | None = None) -> Path:
    """The shared torch; returns its interpreter. Raises DependencyError."""
    folder, wanted = home() / TORCH, digest_file(REQUIREMENTS / f"{TORCH}.txt")
    mark = folder / RECORD
    if mark.exists():
        found = files.read_json(mark, "delete it and run the same command again")
        if found["requirements"] == wanted and Path(found["python"]).exists():
            return Path(found["python"])
    python = _venv(folder / "env", base, say)
    offline = [] if find_links is None else ["--no-index", "--find-links", str(find_links.resolve())]
    _pip(
        python,
        ["-r", str(REQUIREMENTS / f"{TORCH}.txt"), *offline],
        "torch, shared by all scorers (5.5 GB)",
        say,
    )
    files.write_json(mark, {"python": str(python), "requirements": wanted})
    return python


def without_addresses(path: Path, copy: Path) -> Path:
    """Requirements whose packages are taken by name (`cotracker @ git+...` becomes `cotracker`): pip would follow an
    address even where it may use a folder of wheels only. Written to `copy`.
    """
    lines = [line.split(" @ ")[0].rstrip() for line in path.read_text().splitlines()]
    files.write_bytes(copy, ("\n".join(lines) + "\n").encode())
    return copy


def _steps(name: str) -> list[tuple[list[str], Path]]:
    """(options, requirements) of each call of pip: `NAME-no-deps.txt` holds packages whose declared needs are wrong."""
    without = REQUIREMENTS / f"{name}-no-deps.txt"
    steps: list[tuple[list[str], Path]] = [([], REQUIREMENTS / f"{name}.txt")]
    return [*steps, (["--no-deps"], without)] if without.exists() else steps


def _venv(folder: Path, base: Path, say: Say) -> Path:
    python = folder.absolute() / "bin" / "python"
    if not python.exists():
        say(f"{folder}: a new environment of {base}")
        _run([str(base), "-m", "venv", str(folder)], f"{base} -m venv")
    return python


def _site_packages(python: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(_run([str(python), "-I", "-c", code], str(python)).strip())


def _pip(python: Path, arguments: Sequence[str], what: str, say: Say) -> None:
    shown = [Path(argument).name if "/" in argument else argument for argument in arguments]
    say(f"{what}: pip install {' '.join(shown)}")
    options = ["install", "--quiet", "--disable-pip-version-check", "--no-input"]
    _run([str(python), "-m", "pip", *options, *arguments], f"{what}: pip install")


def _run(command: Sequence[str], what: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    except OSError as error:
        raise DependencyError(
            f"{what}: cannot be run ({error.strerror}); give another one with --base"
        ) from error
    if result.returncode:
        lines = [line for line in (result.stderr or result.stdout).splitlines() if line.strip()]
        errors = (
            [line for line in lines if line.startswith(("ERROR", "error"))] or lines[-1:] or ["no message"]
        )
        raise DependencyError(f"{what} failed with exit code {result.returncode}: {errors[-1].strip()[:300]}")
    return result.stdout


_LOOK = """
import importlib, importlib.metadata, json, sys
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
found = {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions() if d.metadata["Name"]}
print("\\n" + json.dumps({"python": sys.version.split()[0], "packages": found}))
"""


def _finish(name: str, python: Path, requirements: str, say: Say) -> dict[str, Any]:
    """Import the package in its environment, then write the record that makes the environment count."""
    say(f"{name}: importing {', '.join(about(name).modules)}")
    command = [str(python), "-I", "-c", _LOOK, json.dumps(about(name).modules)]
    looked = json.loads(_run(command, f"{name}: import").strip().splitlines()[-1])
    found = {
        "scorer": name,
        "python": str(python),
        "version": looked["python"],
        "requirements": requirements,
        "packages": dict(sorted(looked["packages"].items())),
    }
    files.write_json(home() / name / RECORD, found)
    return found
