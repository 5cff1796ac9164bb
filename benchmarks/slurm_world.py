"""A private SLURM and a small project to run on it, for the tests and the fault campaign.

The cluster is real: slurmctld, two slurmd, munge, optionally slurmdbd, all of them in one folder and ended with it
(`start_slurm.sh` of the workplace; WCPIPE_SLURM_SCRIPTS names its folder). The project is the repository's own dvc.yaml
with params.yaml made small, on a tiny random base.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = Path(os.environ.get("WCPIPE_SLURM_SCRIPTS", ROOT.parent / "shared" / "slurm"))
CLUSTER = """
launcher: slurm
margin: 30
polling: {every: 0.5, timeout: 20.0, lost: 60.0}
defaults: {partition: gpu, gres: "gpu:h20:1", time: 10}
stages:
  base: {launcher: local}
  report: {launcher: local}
  prefix: {tasks: 2}
  rollout: {tasks: 2}
  score: {tasks: 2}
  advantage: {gres: }
"""


def why_not() -> str:
    """Why no SLURM can be started here, or nothing."""
    if not (SCRIPTS / "start_slurm.sh").exists():
        return f"{SCRIPTS}/start_slurm.sh is not here (WCPIPE_SLURM_SCRIPTS names its folder)"
    if os.geteuid() != 0:
        return "a private SLURM is started as root"
    return ""


@dataclass
class Cluster:
    """A running private SLURM in `folder`."""

    folder: Path

    @property
    def conf(self) -> Path:
        return self.folder / "slurm.conf"

    def run(self, *command: str, check: bool = True) -> str:
        """A SLURM client command on this cluster; its output."""
        done = subprocess.run(
            command,
            env=os.environ | {"SLURM_CONF": str(self.conf)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if check and done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def pid(self, name: str) -> int:
        """Of one of its daemons, such as slurmctld."""
        lines = [line.split() for line in (self.folder / "pids").read_text().splitlines()]
        return next(int(pid) for found, pid, _ in reversed(lines) if found == name)

    def start_daemon(self, name: str, *command: str) -> None:
        """Start a daemon again that was killed, and note it for the script that stops the cluster."""
        with (self.folder / "log" / f"{name}.again").open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ | {"SLURM_CONF": str(self.conf)},
            )
        start = Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2].split()[19]
        with (self.folder / "pids").open("a") as pids:
            pids.write(f"{name} {process.pid} {start}\n")

    def raise_drained(self) -> None:
        """What an administrator does: give drained nodes back. A slurmctld that lost its last state drains a node whose
        tasks it does not know.
        """
        for node in self.run("sinfo", "-h", "-N", "-t", "drain", "-o", "%N", check=False).split():
            self.run("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)

    def idle(self, seconds: float = 60) -> None:
        """Wait until no job lives. What SLURM holds after its client has gone, an administrator takes away."""
        until = time.monotonic() + seconds
        while jobs := self.run("squeue", "-h", "-r", "-o", "%F_%K %r", check=False).splitlines():
            for job in jobs:
                if "launch failed" in job:
                    self.run("scancel", job.split()[0], check=False)
            if time.monotonic() > until:
                raise RuntimeError(f"jobs do not end: {self.run('squeue', check=False)}")
            time.sleep(0.3)


@contextmanager
def slurm(folder: Path, accounting: bool = False, port: int = 26800, nodes: int = 2) -> Iterator[Cluster]:
    """Start a SLURM in `folder` (below /tmp), installing Debian's packages if need be, and stop it at the end.

    Raises RuntimeError with the script's words when it cannot be started.
    """
    command = [str(SCRIPTS / "start_slurm.sh"), "--dir", str(folder), "--nodes", str(nodes)]
    command += ["--acct"] if accounting else []
    environment = os.environ | {"SLURM_BASE_PORT": str(port)}
    log = folder.with_suffix(".start")
    with log.open("wb") as output:  # no pipe: the daemons would keep it open
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, timeout=600
        )
    if done.returncode != 0:
        raise RuntimeError(f"no SLURM here: {log.read_text()[-600:]}")
    try:
        yield Cluster(folder)
    finally:
        subprocess.run(
            [str(SCRIPTS / "stop_slurm.sh"), str(folder), "--purge"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=120,
            check=False,
        )


@contextmanager
def preloaded(folder: Path) -> Iterator[Path]:
    """A folder with a `wcpipe` that starts without importing anything (benchmarks/preload.py)."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "benchmarks" / "preload.py"), str(folder)]
    server = subprocess.Popen(command, stdin=-1, stdout=-1, env=environment)
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        if server.stdout.readline() != b"ready\n":
            raise RuntimeError("benchmarks/preload.py did not start")
        yield folder / "bin"
    finally:
        server.stdin.close()
        try:
            server.wait(timeout=60)
        except subprocess.TimeoutExpired:
            server.kill()


@dataclass
class Project:
    """A working folder with dvc.yaml, params.yaml, conf/cluster.yaml and weights; `path` is put before PATH."""

    folder: Path
    conf: Path | None
    path: str = ""

    def environment(self, launcher: str) -> dict[str, str]:
        first = f"{self.path}{os.pathsep}" if self.path else ""
        own = {
            "PATH": f"{first}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "DVC_NO_ANALYTICS": "1",
            "WCPIPE_LAUNCHER": launcher,
        }
        return os.environ | own | ({"SLURM_CONF": str(self.conf)} if self.conf else {})

    def start(
        self, *command: str, launcher: str = "slurm", log: str = "output.txt"
    ) -> subprocess.Popen[bytes]:
        """Start a command in the folder; its output is appended to `log`."""
        with (self.folder / log).open("ab") as output:
            return subprocess.Popen(
                command,
                cwd=self.folder,
                env=self.environment(launcher),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def repro(self, launcher: str = "slurm") -> subprocess.Popen[bytes]:
        return self.start(sys.executable, "-m", "dvc", "repro", launcher=launcher)

    def output(self, log: str = "output.txt") -> str:
        return (self.folder / log).read_text(errors="replace")

    def artifacts(self) -> dict[str, str]:
        """Digest of every artifact by name; logs and locks are none."""
        from pipeline.digests import digest_file, digest_tree

        root = self.folder / "artifacts"
        names = sorted(p for p in root.glob("*/*") if p.parent.name != "log" and not p.name.startswith("."))
        return {
            p.relative_to(root).as_posix(): digest_tree(p) if p.is_dir() else digest_file(p) for p in names
        }


def make_project(
    folder: Path,
    base: Path,
    conf: Path | None,
    path: str = "",
    groups: int = 4,
    epochs: int = 1,
    steps: int = 2,
) -> Project:
    """A project of `epochs` epochs on `base`, with the repository's dvc.yaml."""
    shutil.copytree(base, folder / "weights" / "mini")
    shutil.copyfile(ROOT / "dvc.yaml", folder / "dvc.yaml")
    yaml = YAML()
    params = yaml.load((ROOT / "params.yaml").read_text())
    small = {
        "words": {"hold": [1, 3]},
        "sampler": {"steps": steps},
        "prefix": {"groups": groups},
        "rollout": {"candidates": 4},
        "update": {"timesteps": 1, "accumulation": 4},
        "evaluate": {"basic": 1, "compound": 1},
    }
    for section, values in small.items():
        params.setdefault(section, {}).update(values)
    kept = sorted(params["epochs"])[:epochs]
    for epoch in [epoch for epoch in params["epochs"] if epoch not in kept]:
        del params["epochs"][epoch]
    params["compare"] = {"before": "e000", "after": kept[-1]}
    with (folder / "params.yaml").open("w") as file:
        yaml.dump(params, file)
    (folder / "conf").mkdir()
    (folder / "conf" / "cluster.yaml").write_text(CLUSTER)
    project = Project(folder, conf, path)
    if project.start(sys.executable, "-m", "dvc", "init", "--no-scm", log="init.txt").wait(timeout=300) != 0:
        raise RuntimeError(project.output("init.txt"))
    return project
