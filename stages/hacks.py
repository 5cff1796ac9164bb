"""`wcpipe hacks`: the reward table of honest and dishonest videos, by the published formulas and by ours."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stages import options as o
from stages.common import STOP, EpochPaths, load_params, need_policy, open_weights, staged, step_bar

if TYPE_CHECKING:
    from pipeline.config import Params

SHOWN = {
    "published_spatial": "spatial, published",
    "published_temporal": "temporal, published",
    "spatial": "spatial, ours",
    "temporal": "temporal, ours",
    "gate": "gate",
    "action": "action (fine)",
    "quality": "quality drift",
    "published": "total, published",
    "gated": "total, gated",
    "gated_all": "total, action gated too",
    "published_plain": "published, without quality",
    "gated_plain": "gated, without quality",
}


@staged("hacks")
def run_hacks(params: Params, epoch: str, root: Path, cases: int, relations: int) -> dict[str, Any]:
    """Write `evaluation/hacks.json` and `hacks.md` for the policy of `epoch`; returns the table's lines."""
    import numpy as np

    from pipeline import files, rewards
    from pipeline.benchmark import hacks
    from pipeline.errors import ConfigError
    from pipeline.rewards.action import ActionConfig
    from pipeline.rewards.cycle import NO_ALPHA, ClosureConfig
    from pipeline.scorers.registry import engine_digest, open_engine
    from pipeline.scorers.tracks import TracksEngine
    from pipeline.worlds.registry import policy_digest

    if params.world.name != "mini":
        raise ConfigError(f"world.name is {params.world.name}: true renders are needed, which only mini has")
    paths = EpochPaths(root, epoch)
    policy = need_policy(paths)
    closure = rewards.settings("spatial", params.rewards)
    action = rewards.settings("action_fine", params.rewards)
    assert isinstance(closure, ClosureConfig)
    assert isinstance(action, ActionConfig)
    if closure.alpha is None:
        raise ConfigError(f"{NO_ALPHA}; or pass --set rewards.closure.alpha=7")
    folder = Path(params.score.weights)
    bench = hacks.Bench(
        TracksEngine(), open_engine("pose", folder), open_engine("critic", folder), closure, action
    )
    world = open_weights(params, paths.base, policy, "ema")
    prompts = hacks.hack_cases(params, world, cases)
    sample, rows = hacks.sampler_of(world, params), []
    with step_bar("hacks", cases) as advance:
        for number, closed in enumerate(prompts):
            videos = hacks.hack_videos(sample, closed, prompts[(number + 1) % cases])
            rows.append(hacks.reward_rows(bench, closed, videos))
            advance(number + 1)
            STOP.check("before the end: nothing was written; run the same command again")
    related = hacks.relation_rows(bench, params, world, relations)
    relation = {name: float(np.mean([row[name] for row in related])) for name in related[0]}
    table = hacks.summary(rows)
    inputs = {
        "policy": policy_digest(paths.base, policy),
        "engines": {name: engine_digest(name, folder) for name in ("pose", "critic", "tracks")},
        "params": params.dump("seed", "words", "sampler", "rewards"),
        "cases": cases,
        "relations": relations,
    }
    plain = [{key: getattr(value, "__dict__", value) for key, value in line.items()} for line in table]
    found = {"inputs": inputs, "table": plain, "relation": relation, "rows": rows, "relation_rows": related}
    files.write_json(root / "evaluation" / "hacks.json", found)
    text = markdown(table, relation, cases, relations)
    files.write_bytes(root / "evaluation" / "hacks.md", text.encode())
    return {"cases": cases, "text": text, "table": plain, "relation": relation}


def markdown(table: list[dict[str, Any]], relation: dict[str, float], cases: int, relations: int) -> str:
    """Both tables; totals with the paired 95 % interval of their difference to the base."""
    titles = ["video", *SHOWN.values(), "gated, without quality: difference to base"]
    lines = [titles, ["---"] * len(titles)]
    for line in table:
        numbers = [f"{line[name]:.2f}" for name in SHOWN]
        lines.append([line["video"], *numbers, line["gated_plain - base"].shown(1, 2)])
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    names = [name for name in relation if not name.endswith("(ungated)")]
    head = [["video", "relation, gated", "relation, ungated"], ["---"] * 3]
    body = [[name, f"{relation[name]:.3f}", f"{relation[f'{name} (ungated)']:.3f}"] for name in names]
    second = "".join(f"| {' | '.join(line)} |\n" for line in head + body)
    return (
        f"Means over {cases} cycles (two clips, twice) in evaluation rooms.\n\n{text}\n"
        f"Relation: {relations} pairs of words with one end.\n\n{second}"
    )


def command(
    epoch: Annotated[
        str, typer.Option("--epoch", "-e", help="Policy whose videos are the honest ones; e000 is the base.")
    ] = "e000",
    cases: Annotated[int, typer.Option(min=2, help="Cycles.")] = 24,
    relations: Annotated[int, typer.Option(min=1, help="Pairs of words with one end pose.")] = 24,
    root: o.Root = o.ARTIFACTS,
    params: o.ParamsFile = o.PARAMS,
    set_: o.Set = None,
    json: o.Json = False,
) -> None:
    """Reward table of true renders, the base, and static, slow, blurred, swapped and palindrome videos.

    Example: wcpipe hacks --params experiments/cycle-both.yaml
    """
    found = run_hacks(load_params(params, set_), epoch, root, cases, relations)
    if json:
        import json as encoder

        print(encoder.dumps({key: value for key, value in found.items() if key != "text"}))
    else:
        print(found["text"], end="")
