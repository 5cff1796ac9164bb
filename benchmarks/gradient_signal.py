"""How much of an update's gradient is signal? Each group's gradient at the base that rolled out, against their mean.

The gradients of N groups are N draws around the one that improves the policy. `signal` is the share of |g|^2 that they
have in common, (N |mean g|^2 - mean |g|^2) / (N - 1) / mean |g|^2, without bias; its inverse is the number of groups
whose mean has as much signal as noise. Says which layers, noise levels and which kind of noise carry the reward, before
any epoch is trained; and by families of actions, over the self-attention, which actions an update listens to. Prints
one JSON object.

    wcpipe base && for stage in prefix rollout score advantage; do wcpipe $stage --epoch e001; done
    python benchmarks/gradient_signal.py --epoch e001 --set update.noise=group --set update.sigma_min=0.8
"""

import argparse
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from pipeline.config import BASE_EPOCH, epoch_number
from pipeline.flow import add_noise
from pipeline.updates.config import ParamsConfig, UpdateConfig
from pipeline.updates.loop import Levels, TrainingGroup
from pipeline.updates.nft import nft_loss
from pipeline.updates.stored import StoredGroups
from pipeline.updates.trained import prepare_params
from pipeline.words import FAMILIES
from pipeline.worlds.base import WorldModel
from pipeline.worlds.registry import open_world
from stages.common import EpochPaths, load_params, need


def kind_of(name: str) -> str:
    """The layer of a weight whichever block it is in: `blocks.3.attn1.to_q.weight` -> `attn1.to_q`."""
    return re.sub(r"^blocks\.\d+\.|\.\d+(?=\.)|\.(weight|bias)$", "", name)


def family_of(labels_T: torch.Tensor) -> str:
    """The family of words.FAMILIES that all actions of a clip belong to; "several" where they differ."""
    found = {name for name, labels in FAMILIES.items() for label in labels_T.tolist() if label in labels}
    return found.pop() if len(found) == 1 else "several"


def signal_share(gradients_NP: torch.Tensor) -> float:
    """Share of the gradients' mean square that they have in common, unbiased (so it may be a little below 0)."""
    count, square = len(gradients_NP), float(gradients_NP.square().sum(1).mean())
    common = float(gradients_NP.mean(0).square().sum())
    return (count * common - square) / (count - 1) / square if square > 0 else 0.0


def group_gradient(
    world: WorldModel, group: TrainingGroup, levels: Levels, config: UpdateConfig
) -> dict[str, torch.Tensor]:
    """The loss gradient of one group alone at live = old, by weight."""
    context = None
    if len(group.context):
        with torch.no_grad():
            context = world.build_context(
                group.scene, group.history_CTHW, group.context, group.condition
            ).detach()
    pairs = [(n, level) for n in range(len(group)) for level in levels.draw(group.key, group.candidates[n])]
    at = [n for n, _ in pairs]
    x0 = group.x0_NCTHW[at].float()
    noise = torch.stack(
        [levels.noise(x0.shape[1:], group.key, group.candidates[n], level) for n, level in pairs]
    )
    sigma_B, mask_T = levels.sigmas_S[[level for _, level in pairs]], group.loss_mask_T
    x_sigma = torch.where(mask_T[:, None, None], add_noise(x0, noise, sigma_B), x0)
    v = world.velocity(x_sigma, sigma_B, group.clip, group.scene, context)
    mask_BT = mask_T.expand(len(pairs), -1)
    loss_B, _ = nft_loss(x0, x_sigma, sigma_B, v, None, group.r_N[at], config.beta, config.space, mask_BT)
    world.model.zero_grad(set_to_none=True)
    loss_B.mean().backward()
    return {n: p.grad.clone() for n, p in world.model.named_parameters() if p.grad is not None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--params", type=Path, default=Path("params.yaml"))
    parser.add_argument("--root", type=Path, default=Path("artifacts"))
    parser.add_argument("--epoch", default="e001")
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    args = parser.parse_args()
    params = load_params(args.params, args.overrides)
    if params.previous(args.epoch) != BASE_EPOCH:
        parser.error(
            f"--epoch {args.epoch} was rolled out by a trained policy: choose one whose `prev` is the base"
        )
    params = params.for_epoch(args.epoch)
    paths = EpochPaths(args.root, args.epoch)
    world = open_world(params.world.name, paths.base, params.sampler.truncate_timestep)
    prepare_params(world.model, ParamsConfig(kind="full"), params.seed)
    groups = StoredGroups(
        world,
        need(paths, "prefix", paths.prefixes),
        need(paths, "rollout", paths.rollouts),
        need(paths, "advantage", paths.advantages),
    )
    if len(groups.sizes) < 2:
        parser.error(f"{paths.advantages}: holds fewer than two trained groups; raise prefix.groups")
    levels = Levels(params.update, params.seed, epoch_number(args.epoch))
    table: dict[str, list[torch.Tensor]] = defaultdict(list)
    by_family: dict[str, list[torch.Tensor]] = defaultdict(list)
    for index in range(len(groups.sizes)):
        group, parts = groups[index], defaultdict[str, list[torch.Tensor]](list)
        for name, gradient in group_gradient(world, group, levels, params.update).items():
            parts[kind_of(name)].append(gradient.flatten())
        for kind, gradients in parts.items():
            table[kind].append(torch.cat(gradients))
        attention = [table[kind][-1] for kind in sorted(parts) if kind.startswith("attn1.to_")]
        by_family[family_of(group.clip.labels_T[group.loss_mask_T])].append(torch.cat(attention))
    layers: dict[str, Any] = {}
    for kind, gradients in sorted(table.items()):
        share = signal_share(torch.stack(gradients))
        layers[kind] = {
            "weights": gradients[0].numel(),
            "signal": round(share, 4),
            "groups for a signal as large as the noise": round(1 / share) if share > 0 else None,
        }
    families = {
        family: {
            "groups": len(gradients),
            "mean square": float(f"{torch.stack(gradients).square().sum(1).mean():.3g}"),
            "signal": round(signal_share(torch.stack(gradients)), 4) if len(gradients) > 1 else None,
        }
        for family, gradients in sorted(by_family.items())
    }
    update = params.update.model_dump(include={"noise", "sigma_min", "timesteps", "space"})
    print(
        json.dumps(
            {"groups": len(groups.sizes), "update": update, "layers": layers, "families": families}, indent=1
        )
    )


if __name__ == "__main__":
    main()
