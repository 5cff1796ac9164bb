"""Ways in which generated frames go wrong, with a severity: what the critic learns to dislike, and what the
pose network must see through.

All functions take frames (N, 3, H, W) in [0, 1] and a severity (N,) in [0, 1]; 0 leaves a frame as it is
and more is worse. Randomness comes from the generator that is passed, so a training step can be repeated
exactly."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

Degradation = Callable[[torch.Tensor, torch.Tensor, torch.Generator], torch.Tensor]


def _column(severity_N: torch.Tensor) -> torch.Tensor:
    return severity_N[:, None, None, None]


def _gaussian(frames: torch.Tensor, sigma_N: torch.Tensor, radius: int) -> torch.Tensor:
    """Blur each frame with its own width (pixels), as one grouped convolution per axis."""
    n, c, h, w = frames.shape
    at = torch.arange(-radius, radius + 1, dtype=frames.dtype)
    kernel = torch.exp(-0.5 * (at / sigma_N.clamp(min=1e-3)[:, None]) ** 2)
    kernel = (kernel / kernel.sum(1, keepdim=True)).repeat_interleave(c, 0)
    flat = F.pad(frames.reshape(1, n * c, h, w), (radius,) * 4, mode="replicate")
    flat = F.conv2d(flat, kernel[:, None, :, None], groups=n * c)
    return F.conv2d(flat, kernel[:, None, None, :], groups=n * c).view(n, c, h, w)


def blur(frames: torch.Tensor, severity_N: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Gaussian blur of up to 2.5 pixels."""
    return _gaussian(frames, 2.5 * severity_N, radius=5)


def noise(frames: torch.Tensor, severity_N: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """White noise with a std of up to 0.2."""
    return frames + 0.2 * _column(severity_N) * torch.randn(frames.shape, generator=generator)


def blocks(frames: torch.Tensor, severity_N: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Pull the 4x4 or 8x8 blocks (drawn per call) towards their mean, as a coarse codec does."""
    h, w = frames.shape[-2:]
    size = (4, 8)[int(torch.randint(2, (1,), generator=generator))]
    coarse = F.avg_pool2d(frames, size, ceil_mode=True, count_include_pad=False)
    coarse = coarse.repeat_interleave(size, 2)[:, :, :h].repeat_interleave(size, 3)[..., :w]
    return frames + _column(severity_N) * (coarse - frames)


def melt(frames: torch.Tensor, severity_N: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Warp by a smooth random field of up to about a tenth of the height: straight lines bend."""
    n, _, h, w = frames.shape
    field = F.interpolate(
        torch.randn(n, 2, 5, 7, generator=generator), size=(h, w), mode="bicubic", align_corners=True
    )
    identity = torch.eye(2, 3)[None].expand(n, 2, 3)
    grid = F.affine_grid(identity.contiguous(), [n, 1, h, w], align_corners=False)
    reach = 0.2 * severity_N[:, None, None, None] * torch.tensor([h / w, 1.0])
    return F.grid_sample(
        frames, grid + reach * field.permute(0, 2, 3, 1), padding_mode="reflection", align_corners=False
    )


def shuffle(frames: torch.Tensor, severity_N: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Replace a share (up to half) of the 8x8 blocks by other blocks of the same frame."""
    n, c, h, w = frames.shape
    rows, columns = h // 8, w // 8
    cut = frames[..., : rows * 8, : columns * 8].reshape(n, c, rows, 8, columns, 8)
    cut = cut.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
    other = torch.randint(rows * columns, (n, rows * columns), generator=generator)
    moved = torch.rand(n, rows * columns, generator=generator) < 0.5 * severity_N[:, None]
    source = torch.where(moved, other, torch.arange(rows * columns))
    mixed = cut[torch.arange(n)[:, None], source].unflatten(1, (rows, columns)).permute(0, 3, 1, 4, 2, 5)
    out = frames.clone()
    out[..., : rows * 8, : columns * 8] = mixed.reshape(n, c, rows * 8, columns * 8)
    return out


def colour(frames: torch.Tensor, severity_N: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Shift each channel and drift to over- or under-exposure, as long rollouts do."""
    shift = 0.25 * (2 * torch.rand(len(frames), 3, 1, 1, generator=generator) - 1)
    gain = 0.6 * (2 * torch.rand(len(frames), 1, 1, 1, generator=generator) - 1)
    mean = frames.mean(dim=(2, 3), keepdim=True)
    return frames + _column(severity_N) * (shift + gain * (frames - mean))


def ghost(frames: torch.Tensor, severity_N: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Blend with a shifted copy: two moments or two candidate motions averaged."""
    n, _, h, w = frames.shape
    angle = 2 * torch.pi * torch.rand(n, generator=generator)
    reach = 0.1 + 0.15 * torch.rand(n, generator=generator)
    theta = torch.eye(2, 3).repeat(n, 1, 1)
    theta[:, 0, 2], theta[:, 1, 2] = reach * angle.cos(), reach * angle.sin()
    grid = F.affine_grid(theta, [n, 1, h, w], align_corners=False)
    moved = F.grid_sample(frames, grid, padding_mode="reflection", align_corners=False)
    return frames + 0.5 * _column(severity_N) * (moved - frames)


DEGRADATIONS: dict[str, Degradation] = {
    "blur": blur, "noise": noise, "blocks": blocks, "melt": melt, "shuffle": shuffle, "colour": colour, "ghost": ghost,
}  # fmt: skip


def by_reconstruction(reconstruct: Callable[[torch.Tensor], torch.Tensor]) -> Degradation:
    """Blend towards what a codec makes of the frame; `reconstruct` maps frames in [0, 1] to frames in [0,
    1]."""

    def codec(frames: torch.Tensor, severity_N: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return frames + _column(severity_N) * (reconstruct(frames) - frames)

    return codec


def degrade(
    frames: torch.Tensor,
    kind_N: torch.Tensor,
    severity_N: torch.Tensor,
    generator: torch.Generator,
    kinds: dict[str, Degradation],
) -> torch.Tensor:
    """Apply to each frame the kind of its index (in the order of `kinds`); clipped to [0, 1] like any
    stored frame."""
    out = frames.clone()
    for index, function in enumerate(kinds.values()):
        rows = torch.nonzero(kind_N == index)[:, 0]
        if len(rows):
            out[rows] = function(frames[rows], severity_N[rows], generator)
    return out.clamp(0, 1)
