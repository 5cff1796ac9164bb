"""The fault campaign: `dvc repro` on a real private SLURM, disturbed at random, must end as if nothing had happened.

Each run is a fresh project (a tiny random base, one epoch: three arrays of two tasks, two single tasks). Faults are
drawn with a seed and injected one after another while a stage is running; whenever `dvc repro` ends with an error, the
operator's remedy is applied (free the disk, `wcpipe verify --repair`, start slurmctld) and it is started again. Then

* the run completes, and every artifact is bit-identical to that of an undisturbed local run;
* no group that was finished when a fault struck was made again, unless the fault was damage to that very group. A group
  that is made again has a new record file, so the file's time tells.

    python benchmarks/slurm_faults.py --faults 60 --seed 0 [--acct] [--out runs/slurm_faults.json]
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.slurm_injections import INJECTIONS
from benchmarks.slurm_run import Missed, Run
from benchmarks.slurm_world import make_project, preloaded, slurm

TARGET = "update@e001"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--per-run", type=int, default=6, help="faults in one run of dvc repro")
    parser.add_argument("--groups", type=int, default=6)
    parser.add_argument("--acct", action="store_true", help="with slurmdbd and a database")
    parser.add_argument("--port", type=int, default=27800)
    parser.add_argument("--minutes", type=float, default=90.0, help="start no further run after this long")
    parser.add_argument("--only", nargs="*", choices=sorted(INJECTIONS), help="only these kinds")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    kinds = arguments.only or sorted(INJECTIONS)
    dice = random.Random(arguments.seed)
    schedule = [kinds[number % len(kinds)] for number in range(arguments.faults)]
    dice.shuffle(schedule)
    result: dict[str, Any] = {
        "command": " ".join(["python", "benchmarks/slurm_faults.py", *sys.argv[1:]]),
        "accounting": arguments.acct,
        "runs": [],
    }
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="wcpipe-faults-", dir="/tmp") as name:
        work = Path(name)
        with (
            preloaded(work / "preloaded") as path,
            slurm(work / "slurm", arguments.acct, arguments.port) as cluster,
        ):
            from tests.tiny_base import make_tiny_base

            base = make_tiny_base(work / "base")
            calm = make_project(work / "calm", base, None, str(path), arguments.groups)
            if calm.start(sys.executable, "-m", "dvc", "repro", TARGET, launcher="local").wait() != 0:
                raise SystemExit(calm.output()[-2000:])
            expected = calm.artifacts()
            left, number = list(schedule), 0
            while left and time.monotonic() - started < arguments.minutes * 60:
                number += 1
                batch, left = left[: arguments.per_run], left[arguments.per_run :]
                project = make_project(work / f"run{number}", base, cluster.conf, str(path), arguments.groups)
                (project.folder / "artifacts").mkdir()
                size = ["-o", "size=48m"]  # small, so that it can be filled
                subprocess.run(
                    ["mount", "-t", "tmpfs", *size, "wcpipe", project.folder / "artifacts"], check=True
                )
                run = Run(project, cluster, random.Random(f"{arguments.seed}/{number}"), TARGET)
                try:
                    entry = disturb(run, batch)
                    entry["identical"] = project.artifacts() == expected
                finally:
                    subprocess.run(["umount", "-l", project.folder / "artifacts"], check=False)
                result["runs"].append(entry)
                left += entry.pop("missed")  # the stage ended before the fault could be injected: drawn again
                print(json.dumps({"run": number, "left": len(left), **entry}), flush=True)
                subprocess.run(["rm", "-rf", str(project.folder)], check=False)
    summary = summarise(result["runs"])
    result |= summary
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(summary))
    if not summary["all_identical"] or summary["made_twice"]:
        raise SystemExit(1)


def disturb(run: Run, batch: list[str]) -> dict[str, Any]:
    """Inject the faults of `batch` into one run of `dvc repro`, and see it through."""
    start = time.monotonic()
    faults: list[dict[str, Any]] = []
    missed: list[str] = []
    run.start()
    for kind in batch:
        try:
            detail = INJECTIONS[kind](run)
        except Missed:
            missed.append(kind)
            continue
        finally:
            run.restore()
        faults.append({"kind": kind, "detail": detail})
        print(f"  {kind}: {detail}", flush=True)
    run.finish()
    return {
        "faults": faults,
        "missed": missed
        if faults
        else [],  # a run in which nothing could be injected is not tried again for ever
        "repros": run.repros,
        "made_twice": run.made_twice(),
        "seconds": round(time.monotonic() - start, 1),
    }


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    counts = Counter(fault["kind"] for entry in runs for fault in entry["faults"])
    wrong = Counter(fault["kind"] for entry in runs if not entry["identical"] for fault in entry["faults"])
    return {
        "faults": sum(counts.values()),
        "by_kind": dict(sorted(counts.items())),
        "in_runs_that_differ": dict(sorted(wrong.items())),
        "completed_runs": len(runs),
        "all_identical": all(entry["identical"] for entry in runs),
        "made_twice": sum(len(entry["made_twice"]) for entry in runs),
        "repros": sum(entry["repros"] for entry in runs),
    }


def table(summary: dict[str, Any]) -> str:
    lines = ["| fault | injected | runs that differ |", "|---|---|---|"]
    for kind, count in summary["by_kind"].items():
        said = (INJECTIONS[kind].__doc__ or kind).partition(".")[0]
        lines.append(f"| {said} | {count} | {summary['in_runs_that_differ'].get(kind, 0)} |")
    lines.append(
        f"\n{summary['faults']} faults in {summary['completed_runs']} runs, {summary['repros']} starts of dvc repro; "
        f"all artifacts identical: {summary['all_identical']}; finished groups made twice: {summary['made_twice']}"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
