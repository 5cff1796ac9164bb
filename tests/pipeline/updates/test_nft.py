"""The loss against closed forms: what r, beta, v_old and the mask do to value and gradient."""

import pytest
import torch

from pipeline.updates.nft import WEIGHT_FLOOR, branch_velocities, nft_loss

B, SHAPE = 3, (2, 4, 3, 5)


def batch(seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)

    def rand():
        return torch.randn(B, *SHAPE, generator=g, dtype=dtype)

    x0, noise, v, v_old = rand(), rand(), rand(), rand()
    sigma = torch.tensor([0.2, 0.7, 1.0], dtype=dtype)
    s = sigma[:, None, None, None, None]
    return {
        "x0": x0,
        "x_sigma": (1 - s) * x0 + s * noise,
        "sigma": sigma,
        "v": v.requires_grad_(),
        "v_old": v_old,
    }


def grad(r, beta=1.0, v_old="given", space="x0", mask=None, seed=0):
    b = batch(seed)
    if v_old != "given":
        b["v_old"] = b["v"].detach() if v_old == "live" else None
    loss, _ = nft_loss(
        **b, r=torch.as_tensor(r, dtype=torch.float64).expand(B), beta=beta, space=space, mask_BT=mask
    )
    (g,) = torch.autograd.grad(loss.sum(), b["v"])
    return loss.detach(), g


def test_closed_form_of_one_sample():
    b, r, beta = batch(), torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64), 0.4
    loss, metrics = nft_loss(**b, r=r, beta=beta)
    for i in range(B):
        plus = b["x_sigma"][i] - b["sigma"][i] * ((1 - beta) * b["v_old"][i] + beta * b["v"][i])
        minus = b["x_sigma"][i] - b["sigma"][i] * ((1 + beta) * b["v_old"][i] - beta * b["v"][i])
        parts = [((x - b["x0"][i]) ** 2).mean() / (x - b["x0"][i]).abs().mean() for x in (plus, minus)]
        torch.testing.assert_close(loss[i], r[i] * parts[0] + (1 - r[i]) * parts[1])
        torch.testing.assert_close(metrics["loss_plus"][i], parts[0].detach())
        torch.testing.assert_close(metrics["v_gap"][i], (b["v"][i] - b["v_old"][i]).abs().mean().detach())


def test_the_weight_is_detached_and_floored():
    b = batch()
    exact = (b["x_sigma"] - b["x0"]) / b["sigma"][:, None, None, None, None]
    v = (exact + 1e-9).requires_grad_()
    loss, metrics = nft_loss(**{**b, "v": v, "v_old": exact}, r=torch.ones(B), beta=1.0)
    assert torch.equal(metrics["weight_plus"], torch.full((B,), WEIGHT_FLOOR, dtype=torch.float64))
    # detached: d/dv of mean(e^2)/w with w constant
    _, g = grad(1.0)
    b = batch()
    e = (b["x_sigma"] - b["sigma"][:, None, None, None, None] * b["v"] - b["x0"]).detach()
    w = e.abs().flatten(1).mean(1)[:, None, None, None, None]
    torch.testing.assert_close(g, -2 * e * b["sigma"][:, None, None, None, None] / w / e[0].numel())
    assert torch.isfinite(loss).all()


def test_no_gradient_at_half_when_live_equals_old():
    _, g = grad(0.5, v_old="live")
    assert g.abs().max() < 1e-15


def test_gradient_flips_sign_with_r_when_live_equals_old():
    up, down = grad(1.0, v_old="live")[1], grad(0.0, v_old="live")[1]
    torch.testing.assert_close(up, -down)
    assert up.abs().max() > 0


@pytest.mark.parametrize("r", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("beta", [1.0, 0.1])
def test_self_is_the_positive_gradient_times_2r_minus_1(r, beta):
    loss, g = grad(r, beta=beta, v_old="self")
    loss_plus, g_plus = grad(1.0, beta=beta, v_old="self")
    torch.testing.assert_close(g, (2 * r - 1) * g_plus)
    torch.testing.assert_close(loss, loss_plus)  # the value says nothing about r


def test_v_minus_uses_the_old_policy():
    b = batch()
    r = torch.zeros(B)
    with_old, _ = nft_loss(**b, r=r, beta=1.0)
    as_self, _ = nft_loss(**{**b, "v_old": None}, r=r, beta=1.0)
    assert (with_old - as_self).abs().min() > 1e-3


def test_v_old_gets_no_gradient():
    b = batch()
    b["v_old"].requires_grad_()
    loss, _ = nft_loss(**b, r=torch.full((B,), 0.3), beta=0.5)
    loss.sum().backward()
    assert b["v_old"].grad is None


def test_beta_zero_is_the_old_policy_and_beta_one_the_live():
    b = batch()
    plus, minus = branch_velocities(b["v"], b["v_old"], 0.0)
    torch.testing.assert_close(plus, b["v_old"])
    torch.testing.assert_close(minus, b["v_old"])
    plus, minus = branch_velocities(b["v"], b["v_old"], 1.0)
    torch.testing.assert_close(plus, b["v"])
    torch.testing.assert_close(minus, 2 * b["v_old"] - b["v"])


def test_mask_leaves_the_conditioning_latent_out():
    mask = torch.tensor([[False, True, True, True]] * B)
    _, g = grad(0.8, mask=mask)
    assert g[:, :, 0].abs().max() == 0
    assert g[:, :, 1:].abs().min() > 0
    b = batch()
    masked, _ = nft_loss(**b, r=torch.full((B,), 0.8), beta=1.0, mask_BT=mask)
    cut = {k: (t if k == "sigma" else t[:, :, 1:]) for k, t in b.items()}
    alone, _ = nft_loss(**cut, r=torch.full((B,), 0.8), beta=1.0)
    torch.testing.assert_close(masked, alone)


def test_v_space_is_plain_regression():
    b = batch()
    loss, _ = nft_loss(**b, r=torch.ones(B), beta=1.0, space="v")
    target = (b["x_sigma"] - b["x0"]) / b["sigma"][:, None, None, None, None]
    torch.testing.assert_close(loss, (b["v"] - target).square().flatten(1).mean(1))


def test_bf16_input_is_computed_in_fp32():
    b = {k: t.detach().to(torch.bfloat16) for k, t in batch().items()}
    loss, metrics = nft_loss(**b, r=torch.full((B,), 0.3), beta=1.0)
    assert loss.dtype == torch.float32
    assert all(m.dtype == torch.float32 for m in metrics.values())


@pytest.mark.parametrize(
    "bad",
    [
        {"sigma": torch.tensor([0.0, 0.5, 1.0])},
        {"r": torch.tensor([0.5, 1.5, 0.5])},
        {"r": torch.tensor([0.5, float("nan"), 0.5])},
        {"mask_BT": torch.zeros(B, 4, dtype=torch.bool)},
    ],
)
def test_impossible_input_is_refused(bad):
    with pytest.raises(ValueError, match=r"must be|at least one"):
        nft_loss(**{**batch(), "r": torch.full((B,), 0.5), "beta": 1.0, **bad})
