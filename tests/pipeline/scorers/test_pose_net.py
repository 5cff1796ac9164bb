"""The correlation volume, the motion convention, and that the network learns synthetic shifts in seconds."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pipeline.camera import StepSize, poses_from_labels, relative_poses, step_transform
from pipeline.errors import CheckpointError, NumericsError
from pipeline.scorers.pose_net import (
    PoseNet,
    PoseNetConfig,
    PoseScorer,
    local_correlation,
    motion_of_relative,
    relative_of_motion,
)
from pipeline.scorers.train import TrainOptions, fit, spoil, train_pose_net

STEP = StepSize(translation=0.4, rotation_deg=6.0)
SMALL = PoseNetConfig(height=24, width=32, features=16, radius=3, trunk=32, hidden=64)


def shifted_videos(rng, batch, frames=3, size=(SMALL.height, SMALL.width)):
    """Crops of smooth textures that move by up to 3 pixels in x (called yaw) and y (called pitch)."""
    h, w = size
    texture = torch.from_numpy(rng.normal(size=(batch, 3, 10, 12))).float()
    texture = F.interpolate(texture, size=(h + 24, w + 24), mode="bicubic").sigmoid()
    motion = np.zeros((batch, frames - 1, 5))
    motion[..., 3:] = rng.integers(-1, 2, size=(batch, frames - 1, 2))
    at = (
        np.concatenate([np.zeros((batch, 1, 2)), np.cumsum(3 * motion[..., 3:], axis=1)], axis=1).astype(int)
        + 12
    )
    videos = np.stack(
        [
            [(255 * texture[b, :, y : y + h, x : x + w]).byte().permute(1, 2, 0).numpy() for x, y in at[b]]
            for b in range(batch)
        ]
    )
    return videos, relative_of_motion(motion, STEP)


def test_local_correlation_equals_the_plain_loop():
    g = torch.Generator().manual_seed(0)
    first, second = torch.randn(2, 3, 5, 6, generator=g), torch.randn(2, 3, 5, 6, generator=g)
    radius, out = 2, local_correlation(first, second, 2)
    padded = F.pad(second, (radius,) * 4)
    for i in range(5):
        for j in range(5):
            expected = (first * padded[:, :, i : i + 5, j : j + 6]).sum(1)
            torch.testing.assert_close(out[:, i * 5 + j], expected)


@pytest.mark.parametrize("label", range(81))
def test_motion_is_the_step_map_of_camera(label):
    motion = motion_of_relative(step_transform(label, STEP), STEP)
    np.testing.assert_allclose(motion, np.round(motion), atol=1e-12)  # whole steps
    np.testing.assert_allclose(relative_of_motion(motion, STEP), step_transform(label, STEP), atol=1e-12)


def test_motion_round_trip_of_any_5_dof_motion():
    motion = np.random.default_rng(0).normal(size=(4, 3, 5))
    np.testing.assert_allclose(motion_of_relative(relative_of_motion(motion, STEP), STEP), motion, atol=1e-9)


def test_motion_reads_a_path():
    c2w = poses_from_labels([9, 1, 2 * 9 + 3], STEP)
    motion = motion_of_relative(relative_poses(c2w), STEP)
    np.testing.assert_allclose(motion, [[0, 0, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, -1, 0, 1]], atol=1e-9)


def test_long_videos_are_read_in_windows_that_share_a_frame():
    scorer = PoseScorer(PoseNet(SMALL), STEP)
    video, _ = shifted_videos(np.random.default_rng(1), 2, frames=8)
    motion = scorer.motion(video)
    assert motion.shape == (2, 7, 5)
    np.testing.assert_allclose(motion[:, :4], scorer.motion(video[:, :5]), atol=1e-6)
    np.testing.assert_allclose(motion[:, 4:], scorer.motion(video[:, 4:]), atol=1e-6)


def test_a_window_is_read_as_a_whole():
    net = PoseNet(SMALL).eval()
    video = torch.rand(1, 4, 3, 24, 32, generator=torch.Generator().manual_seed(0))
    other = video.clone()
    other[:, 3] = 1 - other[:, 3]
    with torch.no_grad():
        assert not torch.allclose(
            net(video)[:, 0], net(other)[:, 0]
        )  # the last frame informs the first motion


def test_sizes_and_gradients():
    net = PoseNet()
    assert 0.8e6 < sum(p.numel() for p in net.parameters()) < 1.1e6
    out = net(torch.rand(2, 3, 3, 40, 64))
    assert out.shape == (2, 2, 5)
    out.square().sum().backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_learns_shifts_in_seconds_and_survives_saving(tmp_path):
    options = TrainOptions(steps=100, batch=16, seed=1, lr=3e-3, warmup=20)
    torch.manual_seed(0)
    net = train_pose_net(shifted_videos, STEP, options, net=PoseNet(SMALL))
    videos, rel = shifted_videos(np.random.default_rng(99), 64)
    scorer = PoseScorer(net, STEP)
    truth, read = motion_of_relative(rel, STEP), scorer.motion(videos)
    right = (np.round(read[..., 3:]) == np.round(truth[..., 3:])).mean()
    assert right > 0.9, f"only {right:.0%} of the shifts were read (chance is 33 %)"
    assert np.abs(read[..., :3]).max() < 0.5
    scorer.save(tmp_path)
    again = PoseScorer.load(tmp_path)
    assert np.array_equal(again.relative(videos), scorer.relative(videos))
    assert again.step == STEP


def test_training_resumes_bit_equal(tmp_path):
    class Killed(Exception):
        pass

    def train(path, seed, kill_after=None):
        torch.manual_seed(seed)  # initial weights of the resumed net must not matter
        seen = []

        def watch(done, total, metrics):
            seen.append(done)
            if done == kill_after:
                raise Killed

        net = PoseNet(SMALL)
        options = TrainOptions(steps=6, batch=4, checkpoint=path, checkpoint_every=3, warmup=2)
        train_pose_net(shifted_videos, STEP, options, net=net, on_progress=watch)
        return net.state_dict(), seen

    whole, _ = train(tmp_path / "a", seed=3)
    with pytest.raises(Killed):
        train(tmp_path / "b", seed=3, kill_after=4)
    resumed, seen = train(tmp_path / "b", seed=17)
    assert seen == [4, 5, 6]
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)


def test_bf16_training_stays_close():
    def train(bf16):
        torch.manual_seed(3)
        return train_pose_net(
            shifted_videos, STEP, TrainOptions(steps=3, batch=4, bf16=bf16), net=PoseNet(SMALL)
        )

    videos = shifted_videos(np.random.default_rng(0), 4)[0]
    narrow, full = (PoseScorer(train(bf16), STEP).motion(videos) for bf16 in (True, False))
    assert not np.array_equal(narrow, full)
    np.testing.assert_allclose(narrow, full, atol=0.02)


def test_spoiling_keeps_range_and_is_repeatable():
    videos = torch.rand(6, 3, 3, 24, 32)
    one, two = (spoil(videos, torch.Generator().manual_seed(5), lambda x: x.round()) for _ in range(2))
    assert torch.equal(one, two)
    assert one.min() >= 0
    assert one.max() <= 1
    assert not torch.equal(one, videos)


def test_nan_loss_and_foreign_checkpoints_are_named(tmp_path):
    net = PoseNet(SMALL)
    with pytest.raises(NumericsError, match="step 0"):
        fit(
            net,
            lambda rng, g: (net(torch.rand(1, 2, 3, 24, 32)).sum() * float("nan"), {}),
            TrainOptions(steps=1),
        )
    bad = tmp_path / "c.safetensors"
    bad.write_bytes(b"not a checkpoint")
    with pytest.raises(CheckpointError, match=r"c\.safetensors"):
        fit(
            net,
            lambda rng, g: (net(torch.rand(1, 2, 3, 24, 32)).sum(), {}),
            TrainOptions(steps=1, checkpoint=bad),
        )


def test_bad_weights_are_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"pose_net\.json"):
        PoseScorer.load(tmp_path)
    PoseScorer(PoseNet(SMALL), STEP).save(tmp_path)
    weights = tmp_path / "pose_net.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=r"pose_net\.safetensors"):
        PoseScorer.load(tmp_path)
    weights.write_bytes(content)
    text = (tmp_path / "pose_net.json").read_text()
    (tmp_path / "pose_net.json").write_text(text.replace('"hidden": 64', '"hidden": 68'))
    with pytest.raises(CheckpointError, match=r"far\.vector"):
        PoseScorer.load(tmp_path)
    (tmp_path / "pose_net.json").write_text(text.replace('"hidden": 64', '"hidden": 65'))
    with pytest.raises(CheckpointError, match=r"hidden is 65"):
        PoseScorer.load(tmp_path)


def test_other_frame_sizes_are_refused():
    with pytest.raises(ValueError, match="24, 32"):
        PoseScorer(PoseNet(SMALL), STEP).relative(np.zeros((1, 2, 40, 64, 3), np.uint8))
