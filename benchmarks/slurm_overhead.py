"""What an array of four tasks costs over one process that does the same work here, on a real private SLURM.

Both make the rollouts of one epoch on a tiny random base. The machine has few cores, so four tasks are not faster; the
difference is what SLURM, four starts of the program and the waiting client add. With --preload the imports are paid
once, before (benchmarks/preload.py), and what is left is SLURM and the client.

    python benchmarks/slurm_overhead.py --groups 32 --repeat 3 --preload
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.slurm_world import Project, make_project, preloaded, slurm


def seconds(project: Project, launcher: str, stage: str = "rollout") -> float:
    """Wall time of a stage that starts from nothing."""
    shutil.rmtree(project.folder / "artifacts" / "e001" / "rollouts.zarr", ignore_errors=True)
    start = time.perf_counter()
    code = project.start("wcpipe", stage, "--epoch", "e001", launcher=launcher).wait(timeout=1800)
    if code != 0:
        raise SystemExit(project.output()[-2000:])
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--preload", action="store_true")
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="wcpipe-overhead-", dir="/tmp") as name,
        contextlib.ExitStack() as stack,
    ):
        work = Path(name)
        path = str(stack.enter_context(preloaded(work / "preloaded"))) if arguments.preload else ""
        cluster = stack.enter_context(slurm(work / "slurm", port=27300))
        from tests.tiny_base import make_tiny_base

        base = make_tiny_base(work / "base")
        project = make_project(
            work / "project", base, cluster.conf, path, arguments.groups, steps=arguments.steps
        )
        conf = project.folder / "conf" / "cluster.yaml"
        conf.write_text(conf.read_text().replace("rollout: {tasks: 2}", "rollout: {tasks: 4}"))
        for stage in ("base", "prefix"):
            arguments_ = [stage] if stage == "base" else [stage, "--epoch", "e001"]
            if project.start("wcpipe", *arguments_, launcher="local").wait() != 0:
                raise SystemExit(project.output()[-2000:])
        local, array = [], []
        for _ in range(arguments.repeat):  # in turns: other load of the machine meets both
            local.append(round(seconds(project, "local"), 2))
            array.append(round(seconds(project, "slurm"), 2))
        # what is already there, submitted again
        start = time.perf_counter()
        project.start("wcpipe", "rollout", "--epoch", "e001").wait()
        found = {
            "command": " ".join(["python", "benchmarks/slurm_overhead.py", *sys.argv[1:]]),
            "local_s": local,
            "array_of_4_s": array,
            "difference_of_medians_s": round(statistics.median(array) - statistics.median(local), 2),
            "all_done_submitted_again_s": round(time.perf_counter() - start, 2),
        }
        print(json.dumps(found))


if __name__ == "__main__":
    main()
