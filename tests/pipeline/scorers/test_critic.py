"""Degradations order frames, and the critic learns that order on frames and damages it has not seen
together."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pipeline.scorers.critic import Critic, CriticConfig, CriticScorer, preference_loss
from pipeline.scorers.degrade import DEGRADATIONS, by_reconstruction, degrade
from pipeline.scorers.train import TrainOptions, preference_pairs, train_critic


def rooms(rng, batch, size=(24, 32)):
    """Sharp-edged coloured patches over a gradient, uint8."""
    texture = torch.from_numpy(rng.random((batch, 3, 6, 8))).float()
    sharp = F.interpolate(texture, size=size, mode="nearest")
    smooth = F.interpolate(texture, size=size, mode="bicubic")
    return (255 * (0.6 * sharp + 0.4 * smooth).clamp(0, 1)).byte().permute(0, 2, 3, 1).numpy()


@pytest.mark.parametrize("kind", DEGRADATIONS)
def test_severity_zero_is_harmless_and_more_is_worse(kind):
    frames = torch.from_numpy(rooms(np.random.default_rng(0), 8)).permute(0, 3, 1, 2).float() / 255
    kinds, index = {kind: DEGRADATIONS[kind]}, torch.zeros(8, dtype=torch.long)

    def damage(severity):
        out = degrade(frames, index, torch.full((8,), severity), torch.Generator().manual_seed(1), kinds)
        assert out.shape == frames.shape
        assert 0 <= out.min() <= out.max() <= 1
        return (out - frames).square().mean()

    assert damage(0.0) < 1e-6
    assert damage(0.3) < damage(1.0)
    assert damage(1.0) > 1e-4


def test_degrade_touches_only_its_rows():
    frames = torch.rand(4, 3, 24, 32)
    kinds = {"none": lambda f, s, g: f, "codec": by_reconstruction(torch.zeros_like)}
    out = degrade(frames, torch.tensor([0, 1, 0, 1]), torch.ones(4), torch.Generator(), kinds)
    assert torch.equal(out[[0, 2]], frames[[0, 2]])
    assert out[[1, 3]].abs().max() == 0


def test_preference_loss_prefers_the_right_order():
    good, bad = torch.tensor([1.0, 2.0]), torch.tensor([-1.0, 0.0])
    assert preference_loss(good, bad) < preference_loss(bad, good)
    torch.testing.assert_close(
        preference_loss(torch.zeros(3), torch.zeros(3)), torch.tensor(np.log(2)).float()
    )


def test_sizes_and_gradients():
    net = Critic()
    assert sum(p.numel() for p in net.parameters()) < 0.4e6
    net(torch.rand(2, 3, 40, 64)).sum().backward()
    assert all(
        p.grad is not None and p.grad.abs().sum() > 0
        for n, p in net.named_parameters()
        if not n.endswith("2.bias")
    )


def test_learns_the_order_and_survives_saving(tmp_path):
    options = TrainOptions(steps=120, batch=24, seed=2, lr=4e-3, warmup=10)
    net = train_critic(
        rooms, options, net=Critic(CriticConfig(width=16, hidden=32)), reconstruct=lambda x: x.round()
    )
    frames = torch.from_numpy(rooms(np.random.default_rng(77), 128)).permute(0, 3, 1, 2).float() / 255
    better, worse = preference_pairs(frames, torch.Generator().manual_seed(9), DEGRADATIONS)
    as_bytes = [(255 * x).byte().permute(0, 2, 3, 1).numpy() for x in (better, worse)]
    scorer = CriticScorer(net)
    a, b = (scorer.score(x) for x in as_bytes)
    assert (a > b).mean() > 0.75, f"only {(a > b).mean():.0%} of the pairs are in order"
    assert a.dtype == np.float32
    scorer.save(tmp_path)
    assert np.array_equal(CriticScorer.load(tmp_path).score(as_bytes[0]), a)


def test_scores_do_not_depend_on_the_batch_and_empty_is_fine():
    scorer = CriticScorer(Critic(), batch=2)
    frames = rooms(np.random.default_rng(0), 5)
    np.testing.assert_allclose(
        scorer.score(frames), CriticScorer(scorer.net).score(frames), rtol=1e-4, atol=1e-5
    )
    assert scorer.score(frames[:0]).shape == (0,)
    with pytest.raises(ValueError, match="uint8 frames"):
        scorer.score(frames.astype(np.float32))
