"""CycleBench as part of `wcpipe evaluate` and `wcpipe report` (`--suite cyclebench`).

One JSON file a policy or control, `evaluation/cyclebench-<name>.json`, one row a video; the report reads such files.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.common import STOP, EpochPaths, need_policy, open_weights, staged, step_bar

if TYPE_CHECKING:
    from pipeline.benchmark.cyclebench import CycleCase, Judges
    from pipeline.config import Params
    from pipeline.worlds.scene_store import Scenes

    OnCase = Callable[[int, int], None]
    Judge = Callable[[list[CycleCase], Judges, OnCase], list[dict[str, Any]]]

log = logging.getLogger("wcpipe.cyclebench")
CODE = 2  # as in stages.prefix; 2: the oracle moves as keys can
TITLES = {
    "esc": "end closure ESC (d)",
    "rps": "way back RPS (d)",
    "rcs": "repeats RCS (d)",
    "esc_reward": "end closure, tracker that rewards (d)",
    "oracle_drift": "camera's drift, oracle (units)",
    "oracle_turn": "camera's turn, oracle (degrees)",
    "excursion": "excursion made, pose scorer",
    "oracle_excursion": "excursion made, oracle",
    "closure_ratio": "closure ratio",
    "accuracy": "action accuracy, pose scorer",
    "oracle_accuracy": "action accuracy, oracle",
    "quality": "visual quality, critic",
    "coverage": "points found again",
    "failed": "failed pairs",
    "oracle_failed": "frames off the manifold",
}


def bench_path(root: Path, name: str) -> Path:
    """Where the rows of a policy or control lie."""
    return root / "evaluation" / f"cyclebench-{name}.json"


def _subject(subject: str, params: Params) -> str:
    usual = type(params.cyclebench)()
    parts = [
        getattr(params.cyclebench, key)
        for key in ("split", "weights")
        if getattr(params.cyclebench, key) != getattr(usual, key)
    ]
    return "-".join([subject, *parts])


@staged("evaluate")
def run_cyclebench(params: Params, epoch: str, root: Path, name: str | None = None) -> dict[str, Any]:
    """Write the rows of the policy of `epoch`, unless they are there and were made from the same inputs."""
    from pipeline.benchmark.cyclebench import evaluate_cycles, generate_cycle
    from pipeline.updates.checkpoint import read_state
    from pipeline.worlds.registry import base_digest, prompt_source, source_inputs

    paths, config = EpochPaths(root, epoch), params.cyclebench
    need_policy(paths)
    inputs = {
        "base": base_digest(paths.base),
        "policy": read_state(paths.policy)["files"][f"{config.weights}.safetensors"],
        "params": params.dump("sampler", "cyclebench") | {"world": params.world.name},
        **source_inputs(params.world),
    }

    sampler = params.sampler
    world = open_weights(params, paths.base, paths.policy, config.weights)

    def judge(cases: list[CycleCase], judges: Judges, on_case: OnCase) -> list[dict[str, Any]]:
        oracle = config.oracle and params.world.name == "mini"
        return evaluate_cycles(
            cases,
            lambda case: generate_cycle(world, case, config.seed, sampler.steps, sampler.shift, sampler.cfg),
            judges,
            world.spec.stride,
            oracle,
            on_case=on_case,
        )

    path, source = bench_path(root, name or _subject(epoch, params)), prompt_source(params.world, world.spec)
    return _evaluate(params, path, inputs, judge, source)


@staged("evaluate")
def run_cycle_control(params: Params, control: str, root: Path, name: str | None = None) -> dict[str, Any]:
    """Write the rows of a control of the mini world. Raises UsageError for an unknown one."""
    from pipeline.benchmark.cycle_controls import CYCLE_CONTROLS, other_room
    from pipeline.benchmark.cyclebench import evaluate_cycles
    from pipeline.config import nearest
    from pipeline.errors import ConfigError, UsageError

    kind = control.removeprefix("control-")
    if kind not in CYCLE_CONTROLS:
        raise UsageError(f"--control {kind}: no such control; {nearest(kind, CYCLE_CONTROLS)}")
    if params.world.name != "mini":
        raise ConfigError(
            f"world.name is {params.world.name}: controls are made of true renders, which only mini has"
        )
    config = params.cyclebench
    inputs = {
        "control": kind,
        "params": {"cyclebench": config.model_dump(mode="json", exclude={"weights"})},
    }

    def judge(cases: list[CycleCase], judges: Judges, on_case: OnCase) -> list[dict[str, Any]]:
        later = other_room(cases) if kind == "random" else None
        oracle = config.oracle and kind != "random"
        return evaluate_cycles(cases, CYCLE_CONTROLS[kind], judges, 1, oracle, later, on_case)

    return _evaluate(params, bench_path(root, name or control), inputs, judge, params.world.name)


def _evaluate(
    params: Params, path: Path, inputs: dict[str, Any], judge: Judge, source: str | Scenes
) -> dict[str, Any]:
    """The rows at `path` if they were made from `inputs`; otherwise those of `judge`, written there."""
    from pipeline import files
    from pipeline.benchmark.cycle_words import DIGEST, MINI_DIGEST
    from pipeline.benchmark.cyclebench import make_cycle_cases
    from pipeline.digests import input_changes
    from pipeline.errors import DataError
    from pipeline.scorers.choice import choose

    words = {"published": DIGEST, "mini": MINI_DIGEST}[params.cyclebench.words]
    scorers = [choose(name, params).digest() for name in ("pose", "critic", "tracks")]
    inputs = {"stage": "cyclebench", "code": CODE, "words": words, "scorers": scorers, **inputs}
    try:
        done = files.read_json(path, "")
        changes = input_changes(done["inputs"], inputs)
        if not changes:
            return _summary(done["rows"]) | {"made": 0}
        log.warning("%s: was made from other inputs (%s): it is replaced", path, "; ".join(changes[:3]))
    except (DataError, KeyError, TypeError, AttributeError):
        pass  # there is none yet, or it is damaged: it is made
    cases = make_cycle_cases(params.cyclebench, source)
    with step_bar(f"evaluate {path.stem}", len(cases)) as advance:

        def on_case(done: int, total: int) -> None:
            advance(done)
            STOP.check("before the end: the cases so far are lost; run the same command again to start over")

        rows = judge(cases, _judges(params), on_case)
    files.write_json(path, {"inputs": inputs, "rows": rows})
    return _summary(rows) | {"made": len(rows)}


def _judges(params: Params) -> Judges:
    """The engines that params.yaml names for poses, quality and rewarded tracks, and the benchmark's matcher."""
    from pipeline.benchmark.cyclebench import Judges
    from pipeline.scorers.choice import choose
    from pipeline.scorers.tracker import PatchMatcher, Tracker
    from pipeline.scorers.tracks import TracksEngine

    tracks = choose("tracks", params).open()
    assert isinstance(tracks, TracksEngine)
    matcher: Tracker = PatchMatcher()
    if params.cyclebench.matcher == "roma":
        from pipeline.scorers.worker_settings import worker_settings
        from pipeline.scorers.workers import open_tracker

        matcher = open_tracker("roma", worker_settings("roma", params.score.workers))
    return Judges(choose("pose", params).open(), choose("critic", params).open(), matcher, tracks.tracker)


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over all videos of each setting, for the one-line summary."""
    from pipeline.benchmark.cyclebench import table

    names = ("esc", "rps", "rcs", "excursion", "accuracy", "oracle_drift")
    return {
        line["setting"]: {name: round(line[name], 4) for name in names if line[name] is not None}
        for line in table(rows)
        if line["task"] == "all" and line["setting"] != "all"
    }


def load_bench(path: Path) -> list[dict[str, Any]]:
    """Rows of a file of this suite. Raises DataError."""
    from pipeline import files
    from pipeline.errors import DataError

    rows = files.read_json(path, "run `wcpipe evaluate --suite cyclebench`").get("rows")
    if not isinstance(rows, list) or not rows or "esc" not in rows[0]:
        raise DataError(f"{path}: holds no rows of cyclebench; run `wcpipe evaluate --suite cyclebench`")
    return rows


def parse_arms(texts: Sequence[str], root: Path) -> dict[str, list[Path]]:
    """`name=file,file` (one file a seed) -> files by arm; none given: every file below `root`. Raises UsageError."""
    from pipeline.errors import UsageError

    if not texts:
        paths = (root / "evaluation").glob("cyclebench-*.json")
        found = sorted(
            paths, key=lambda path: ("-control-" in path.name, path.name)
        )  # policies, then controls
        if not found:
            raise UsageError(
                f"{root}/evaluation holds no cyclebench-*.json: run `wcpipe evaluate --suite cyclebench`"
            )
        named = {path.stem.removeprefix("cyclebench-"): [path] for path in found}
        first = ["e000"] if "e000" in named else []  # the base is what all are compared with
        return {name: named[name] for name in [*first, *named]}
    arms = {}
    for text in texts:
        name, separator, listed = text.partition("=")
        if not separator or not name or not listed:
            raise UsageError(f"--arm {text}: write name=file,file with one file a seed")
        arms[name] = [Path(path) for path in listed.split(",")]
    return arms


def compare_arms(arms: Mapping[str, list[list[dict[str, Any]]]], by: str = "setting") -> list[dict[str, Any]]:
    """One line a metric and setting: mean of each arm with its interval, and the paired difference to the first arm.

    An arm has one list of rows a seed. Arms with as many seeds as the first are paired seed by seed; a single list (the
    base) is compared with all. Raises DataError where the videos are not the same.
    """
    import numpy as np

    from pipeline.benchmark.statistics import bootstrap, paired
    from pipeline.errors import DataError

    names = list(arms)
    first = arms[names[0]]
    keys = [
        [(r["task"], r["setting"], r["word"], r["scene"]) for r in rows]
        for seeds in arms.values()
        for rows in seeds
    ]
    if any(key != keys[0] for key in keys):
        raise DataError("the files hold different videos: make all with the same `cyclebench` parameters")
    lines: list[dict[str, Any]] = []
    for setting in [*dict.fromkeys(row[by] for row in first[0]), "all"]:
        chosen = [i for i, row in enumerate(first[0]) if setting in (row[by], "all")]
        for metric, title in TITLES.items():
            values = {
                name: np.array([[_number(rows[i].get(metric)) for i in chosen] for rows in seeds])
                for name, seeds in arms.items()
            }
            if not any(np.isfinite(v).any() for v in values.values()):
                continue
            line: dict[str, Any] = {by: setting, "metric": metric, "title": title}
            for name, v in values.items():
                defined = np.isfinite(v).all(0)
                line[name] = bootstrap(v[:, defined].mean(0)) if defined.any() else None
                same = len(v) == len(values[names[0]]) or 1 in (len(v), len(values[names[0]]))
                both = defined & np.isfinite(values[names[0]]).all(0)
                if name != names[0] and same and both.any():
                    one, other = v[:, both], values[names[0]][:, both]
                    rows_ = max(len(one), len(other))
                    line[f"{name} - {names[0]}"] = paired(
                        np.broadcast_to(one, (rows_, one.shape[1])),
                        np.broadcast_to(other, (rows_, one.shape[1])),
                    )
            lines.append(line)
    return lines


def _number(value: Any) -> float:
    return float("nan") if value is None else float(value)


def markdown(lines: list[dict[str, Any]], by: str = "setting") -> str:
    """The comparison as a table."""
    columns = list(dict.fromkeys(key for line in lines for key in line if key not in (by, "metric", "title")))
    head = [by, "metric", *columns]
    out = [head, ["---"] * len(head)]
    for line in lines:
        shown = [line[key].shown(1, 3) if line.get(key) is not None else "-" for key in columns]
        out.append([line[by], line["title"], *shown])
    return "".join(f"| {' | '.join(line)} |\n" for line in out)


def run_bench_report(root: Path, arms: Sequence[str], as_json: bool, by: str = "setting") -> None:
    """Write `evaluation/cyclebench.md` and print it."""
    import json

    from pipeline import files

    rows = {name: [load_bench(path) for path in paths] for name, paths in parse_arms(arms, root).items()}
    lines = compare_arms(rows, by)
    text = markdown(lines, by)
    files.write_bytes(root / "evaluation" / "cyclebench.md", text.encode())
    if as_json:
        print(json.dumps([{key: getattr(v, "__dict__", v) for key, v in line.items()} for line in lines]))
    else:
        print(text, end="")
