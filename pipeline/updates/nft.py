"""The DiffusionNFT loss: reinforce the good and repel the bad with plain flow-matching regressions, no
likelihoods.

For a sample x0 with weight r in [0, 1] (1 = best) and a noisy x_sigma = (1 - sigma) x0 + sigma noise:

    v+ = (1 - beta) v_old + beta v          v- = (1 + beta) v_old - beta v
    x0+- = x_sigma - sigma v+-              L+- = mean (x0+- - x0)^2 / w+-       L = r L+ + (1 - r) L-
    w+- = max(mean |x0+- - x0|, 1e-5), detached, one number a sample

v_old is the behaviour policy. The released WorldCompass computes it and then overwrites it with the live
model (its `old: self`): then L does not depend on r and its gradient is (2r - 1) grad L+. Both are here;
the real v_old is the default (spec/worldcompass.md 5.2, DESIGN 6.1). Neither the 1/beta of DiffusionNFT nor
its KL term is used, as in WorldCompass; under AdamW a common factor matters through gradient clipping only.

Per-sample losses are returned, and the caller takes the mean over timesteps, samples and accumulation, so
that the result does not depend on how they are split (the reference sums over timesteps)."""

from typing import Literal

import torch

WEIGHT_FLOOR = 1e-5


def branch_velocities(v: torch.Tensor, v_old: torch.Tensor, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(v+, v-): the implicit positive and negative policies around the detached v_old."""
    v_old = v_old.detach()
    return (1 - beta) * v_old + beta * v, (1 + beta) * v_old - beta * v


def _masked_mean(x_BCTHW: torch.Tensor, mask_BT: torch.Tensor | None) -> torch.Tensor:
    """Mean over all but the batch axis, over the unmasked latents only: (B,)."""
    if mask_BT is None:
        return x_BCTHW.flatten(1).mean(1)
    per_latent_BT = x_BCTHW.mean(dim=(1, 3, 4))
    mask = mask_BT.to(per_latent_BT.dtype)
    return (per_latent_BT * mask).sum(1) / mask.sum(1)


def _branch_loss(
    error_BCTHW: torch.Tensor, mask_BT: torch.Tensor | None, weighted: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss_B, weight_B) of one branch's error."""
    squared = _masked_mean(error_BCTHW.square(), mask_BT)
    if not weighted:
        return squared, torch.ones_like(squared)
    with (
        torch.no_grad()
    ):  # in fp64, as the reference: the weight divides, so its rounding would be a gradient scale
        weight = _masked_mean(error_BCTHW.detach().double().abs(), mask_BT).clamp(min=WEIGHT_FLOOR)
    return squared / weight.to(squared.dtype), weight.to(squared.dtype)


def nft_loss(
    x0: torch.Tensor,
    x_sigma: torch.Tensor,
    sigma: torch.Tensor,
    v: torch.Tensor,
    v_old: torch.Tensor | None,
    r: torch.Tensor,
    beta: float,
    space: Literal["x0", "v"] = "x0",
    mask_BT: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss of each sample, (B,), with gradient in `v` only, and detached metrics, each (B,).

    x0, x_sigma, v, v_old are latents (B, C, T, H, W); sigma and r are (B,), sigma in (0, 1], r in [0, 1].
    `v_old=None` means `old: self`: the live prediction, detached. `mask_BT` (bool) marks the latents that
    carry loss: the first clip's conditioning latent carries none. `space="v"` regresses v+- on (x_sigma -
    x0) / sigma without the self-normalising weight. Math in fp32 (or fp64 input's fp64) whatever the
    autocast.

    Metrics: v_gap = mean |v - v_old|, x0_norm = rms of the live x0 prediction (it grows when quality breaks),
    loss_plus, loss_minus, weight_plus. Raises ValueError for sigma <= 0, r outside [0, 1] or a mask without
    a latent."""
    if bool((sigma <= 0).any()) or bool((r < 0).any()) or bool((r > 1).any()) or bool(r.isnan().any()):
        raise ValueError(f"sigma must be above 0 and r in [0, 1], got sigma {sigma.tolist()}, r {r.tolist()}")
    if mask_BT is not None and not bool(mask_BT.any(dim=1).all()):
        raise ValueError("every sample needs at least one latent that carries loss")
    dtype = torch.promote_types(x0.dtype, torch.float32)
    x0, x_sigma, v = x0.to(dtype), x_sigma.to(dtype), v.to(dtype)
    v_old = v.detach() if v_old is None else v_old.detach().to(dtype)
    sigma_B = sigma.to(v)
    sigma_B1111, r = sigma_B[:, None, None, None, None], r.to(v)

    v_plus, v_minus = branch_velocities(v, v_old, beta)
    if space == "x0":
        error_plus, error_minus = x_sigma - sigma_B1111 * v_plus - x0, x_sigma - sigma_B1111 * v_minus - x0
    else:
        target = (x_sigma - x0) / sigma_B1111
        error_plus, error_minus = v_plus - target, v_minus - target
    loss_plus, weight_plus = _branch_loss(error_plus, mask_BT, weighted=space == "x0")
    loss_minus, _ = _branch_loss(error_minus, mask_BT, weighted=space == "x0")
    loss = r * loss_plus + (1 - r) * loss_minus

    with torch.no_grad():
        metrics = {
            "v_gap": _masked_mean((v - v_old).abs(), mask_BT),
            "x0_norm": _masked_mean((x_sigma - sigma_B1111 * v).square(), mask_BT).sqrt(),
            "loss_plus": loss_plus.detach(),
            "loss_minus": loss_minus.detach(),
            "weight_plus": weight_plus,
        }
    return loss, metrics
