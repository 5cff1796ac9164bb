"""What the 5B costs on one GPU, measured: the numbers that docs/bases.md can only derive.

Builds the full-size network with random weights in bf16 (no published weights are needed: speed and memory do not
depend on them) and measures, in this order, each part only if the time left allows it:

    golden        fp32 and bf16 on this device against the stored outputs of the published code (tiny network)
    context       the context pass of 16 latents, and the bytes of its cache
    step          one denoiser step of a clip of 4 latents, for 1 and for several candidates
    clip          a whole clip of 4 steps: candidates as one batch against one after the other, and their difference
    update        one LoRA update through the real loop (old forward, forward, backward), with and without activation
                  checkpointing

The JSON is written again after every part, and a part that does not fit into memory says so.

    python benchmarks/gpu_bases.py --out gpu_bases.json            # one H200 or H20, at most 8 minutes
    python benchmarks/gpu_bases.py --size tiny --device cpu --out tiny.json    # the same path in seconds, no numbers

Exit code 10, and "not run: no GPU" on stderr and in the JSON, where there is no GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import runpy
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from pipeline import files, flow
from pipeline.errors import DependencyError
from pipeline.updates.config import ExecutionConfig, ParamsConfig, UpdateConfig
from pipeline.updates.loop import TrainingGroup, update_epoch
from pipeline.updates.policy import Policy
from pipeline.updates.trained import prepare_params
from pipeline.worlds.attention import RawContext
from pipeline.worlds.base import ClipCondition, MemoryRule, Scene, WorldSpec
from pipeline.worlds.wan import WorldPlayWan
from pipeline.worlds.wan_world import WanWorld

GOLDEN = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 24,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 32,
    "ffn_dim": 64,
    "num_layers": 2,
    "rope_max_seq_len": 64,
}


@dataclass(frozen=True)
class Size:
    """A network, its latents (C, h, w), text tokens, context latents, candidates of a batch, LoRA rank and levels."""

    options: dict[str, Any]
    latent: tuple[int, int, int]
    text: int
    context: int
    candidates: int
    rank: int
    levels: int


SIZES = {
    "5b": Size({}, (48, 44, 80), 512, 16, 4, 64, 2),
    "tiny": Size(GOLDEN, (4, 4, 6), 7, 8, 2, 2, 1),
}


class Report:
    """The JSON in the making: every part is measured, skipped with a reason, or out of memory."""

    def __init__(self, path: Path, device: torch.device, seconds: float) -> None:
        self.path, self.device, self.seconds = path, device, seconds
        self.start = time.monotonic()
        self.content: dict[str, Any] = {"run": True, "device": str(device), "torch": torch.__version__}
        if device.type == "cuda":
            about = torch.cuda.get_device_properties(device)
            self.content |= {"gpu": about.name, "memory_gb": round(about.total_memory / 1e9, 1)}

    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.start)

    def part(self, name: str, guess: float, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Run one part if `guess` seconds are left for it, and write down what it says and its peak memory."""
        if guess > self.left():
            found: dict[str, Any] = {"skipped": f"{guess:.0f} s needed, {self.left():.0f} s left"}
        else:
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)
            begun = time.monotonic()
            try:
                found = measure()
            except torch.OutOfMemoryError as error:
                found = {"out_of_memory": str(error).splitlines()[0]}
            found["seconds_in_all"] = round(time.monotonic() - begun, 2)
            if self.device.type == "cuda":
                found["peak_gb"] = round(torch.cuda.max_memory_allocated(self.device) / 1e9, 2)
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        self.content[name] = found
        files.write_json(self.path, self.content)
        print(f"{name}: {json.dumps(found)}", file=sys.stderr, flush=True)
        return found

    def timed(self, work: Callable[[], Any], repeats: int) -> float:
        """Median seconds of `work` after one run to warm up."""
        work()
        seconds = []
        for _ in range(repeats):
            self.wait()
            begun = time.perf_counter()
            work()
            self.wait()
            seconds.append(time.perf_counter() - begun)
        return median(seconds)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def random_network(options: dict[str, Any], device: torch.device) -> WorldPlayWan:
    """The network on the device in bf16 without ever being in host memory: normal weights of std 0.02, norms 1."""
    with torch.device("meta"):
        model = WorldPlayWan(**options)
    model.to(torch.bfloat16).to_empty(device=device)
    renew_rope(model, device)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02, generator=generator)
    return model.eval().requires_grad_(False)


def renew_rope(model: WorldPlayWan, device: torch.device) -> None:
    """The RoPE tables are computed, not weights: a network that changed its dtype needs them anew, as on loading."""
    rope = model.rope
    model.rope = type(rope)(rope.attention_head_dim, rope.patch_size, rope.max_seq_len).to(device)


class Case:
    """Random latents, a walk forward, and the world around the network."""

    def __init__(self, size: Size, device: torch.device) -> None:
        _, height, width = size.latent
        self.size, self.latents = size, size.context + 4
        self.kept: RawContext | None = None  # the context that later parts share
        spec = WorldSpec(
            latent_shape=size.latent,
            frame_size=(16 * height, 16 * width),
            memory=MemoryRule(budget=size.context, recent=size.context - 4),
            steps=4,
            shift=8.0,
        )
        self.world = WanWorld(random_network(size.options, device), None, spec)  # no frame is made: no codec
        c2w = np.tile(np.eye(4), (self.latents, 1, 1))
        c2w[:, 2, 3] = 0.08 * np.arange(self.latents)
        self.condition = ClipCondition.of(
            np.full(self.latents, 9), c2w, np.array([[0.505, 0, 0.5], [0, 0.898, 0.5], [0, 0, 1.0]])
        )
        self.clip = self.condition.select(slice(size.context, None))
        self.history = self.noise(1, size.context)[0]
        text_dim = self.world.model.config.text_dim
        self.scene = Scene(self.history[:, 0], torch.randn(size.text, text_dim), "random")
        self.work = tflop(self.world.model.config, size)

    def noise(self, count: int, latents: int = 4) -> torch.Tensor:
        shape = (self.size.latent[0], latents, *self.size.latent[1:])
        return torch.stack(
            [
                flow.keyed_noise(shape, seed=0, epoch=0, group="g", candidate=n, purpose="benchmark")
                for n in range(count)
            ]
        )

    def context(self) -> RawContext:
        found = self.world.build_context(self.scene, self.history, range(self.size.context), self.condition)
        assert isinstance(found, RawContext)
        return found


def tflop(config: Any, size: Size) -> dict[str, float]:
    """Work of one step and one context pass by the formulas of docs/bases.md, in TFLOP."""
    D, N = config.num_attention_heads * config.attention_head_dim, config.num_layers
    tokens = (size.latent[1] // config.patch_size[1]) * (size.latent[2] // config.patch_size[2])
    q, c, weights = 4 * tokens, size.context * tokens, 7 * D**2 + 2 * D * config.ffn_dim
    return {
        "step": (2 * N * weights * q + 8 * N * D * q * (q + c)) / 1e12,
        "context": (2 * N * weights * c + 8 * N * D * c * c) / 1e12,
    }


def golden(folder: Path, device: torch.device) -> dict[str, Any]:
    """Largest difference to the stored outputs in fp32, and the relative squared error in bf16."""
    fill = SimpleNamespace(**runpy.run_path(str(folder / "fill.py")))
    stored = load_file(folder / "wan5b.safetensors")
    model = WorldPlayWan(**GOLDEN).eval()
    fill.fill_parameters(model.named_parameters())
    K = torch.tensor([[0.505050505, 0, 0.5], [0, 0.897867565, 0.5], [0, 0, 1]]).expand(1, 8, 3, 3)
    cameras = (torch.tensor([[0, 9, 11, 40, 9, 9, 0, 12]]), fill.poses(8), K)
    latents, text = fill.wave("x", (1, 4, 8, 4, 6), 0.6), fill.wave("text", (1, 7, 16), 0.6)

    def outputs(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        model.to(device, dtype)
        renew_rope(model, device)

        def run(mode: str, at: slice, times: list[float], start: int, context: Any = None) -> Any:
            return model(
                mode,
                latents[:, :, at].to(device),
                torch.tensor([times], device=device),
                *(part[:, at].to(device) for part in cameras),
                text.to(device),
                start,
                context,
            )

        with torch.no_grad():
            first = run("velocity", slice(0, 4), [14.0, 500, 500, 500], 0)
            context = run("context", slice(0, 4), [14.0] * 4, 0)
            second = run("velocity", slice(4, 8), [960.0] * 4, 4, context)
        return {"chunk0": first.float().cpu(), "chunk1": second.float().cpu()}

    precise, narrow = outputs(torch.float32), outputs(torch.bfloat16)
    return {
        "fp32_largest": max(float((precise[name] - stored[name]).abs().max()) for name in precise),
        "bf16_largest": max(float((narrow[name] - stored[name]).abs().max()) for name in narrow),
        "bf16_relative_squared": max(
            float((narrow[name] - stored[name]).square().mean() / stored[name].square().mean())
            for name in narrow
        ),
    }


def measure_context(case: Case, report: Report, repeats: int) -> dict[str, Any]:
    seconds = report.timed(case.context, repeats)
    cache = case.context()
    size = sum(part.numel() * part.element_size() for pair in cache.layers for part in pair)
    rate = case.work["context"] / seconds
    return {"seconds": seconds, "tflop": case.work["context"], "tflop_per_s": rate, "cache_gb": size / 1e9}


@torch.no_grad()
def measure_step(case: Case, report: Report, repeats: int) -> dict[str, Any]:
    out: dict[str, Any] = {"tflop": case.work["step"]}
    for count in sorted({1, case.size.candidates}):
        x = case.noise(count).to(report.device)
        seconds = report.timed(
            lambda x=x: case.world.velocity(x, 0.9, case.clip, case.scene, case.kept), repeats
        )
        out[f"seconds_batch_{count}"] = seconds
        out[f"tflop_per_s_batch_{count}"] = count * case.work["step"] / seconds
    return out


def measure_clip(case: Case, report: Report, repeats: int) -> dict[str, Any]:
    sigmas, x = flow.sigmas(case.world.spec.steps, case.world.spec.shift), case.noise(case.size.candidates)

    def sample(noise: torch.Tensor) -> torch.Tensor:
        return case.world.sample_clip(case.scene, case.kept, case.clip, sigmas, noise)

    def one_by_one() -> torch.Tensor:
        return torch.cat([sample(noise[None]) for noise in x])

    alone = report.timed(lambda: sample(x[:1]), repeats)
    batched, sequential = report.timed(lambda: sample(x), repeats), report.timed(one_by_one, repeats)
    return {
        "steps": case.world.spec.steps,
        "candidates": case.size.candidates,
        "seconds_one": alone,
        "seconds_batched": batched,
        "seconds_sequential": sequential,
        "sequential_to_batched": sequential / batched,
        "largest_difference": float((sample(x) - one_by_one()).abs().max()),
    }


def measure_update(case: Case, checkpointing: bool) -> dict[str, Any]:
    """One epoch of one group of two samples; the adapters of a former call are trained on."""
    config = UpdateConfig(
        steps=4,
        shift=8.0,
        timesteps=case.size.levels,
        accumulation=2,
        micro_batch=1,
        params=ParamsConfig(kind="lora", rank=case.size.rank),
        execution=ExecutionConfig(checkpointing=checkpointing),
    )
    model = case.world.model
    if not any(parameter.requires_grad for parameter in model.parameters()):
        prepare_params(model, config.params, 0)
    (model.enable_gradient_checkpointing if checkpointing else model.disable_gradient_checkpointing)()
    policy = Policy(model, config)
    group = TrainingGroup(
        key="benchmark",
        scene=case.scene,
        history_CTHW=case.history,
        context=list(range(case.size.context)),
        condition=case.condition,
        clip=case.clip,
        x0_NCTHW=case.noise(2),
        r_N=torch.tensor([1.0, 0.0]),
        candidates=[0, 1],
        loss_mask_T=case.world.loss_mask_T(1),
    )
    begun = time.perf_counter()
    metrics = update_epoch(case.world, policy, [group], config, 0, 1)
    return {
        "seconds": time.perf_counter() - begun,
        "samples": 2,
        "levels": case.size.levels,
        "trained_weights": sum(p.numel() for p in policy.params.values()),
        "grad_norm": metrics["grad_norm"],
        "finite": bool(np.isfinite(list(metrics.values())).all()),
    }


def run(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """All parts in order; returns what was written."""
    torch.backends.cuda.matmul.allow_tf32 = False  # fp32 is to mean fp32
    torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    size, repeats = SIZES[arguments.size], arguments.repeats
    report = Report(arguments.out, device, arguments.seconds)
    report.content |= {"size": arguments.size, "context_latents": size.context}
    report.part("golden", 10, lambda: golden(arguments.golden, device))
    made: dict[str, Case] = {}

    def build() -> dict[str, Any]:
        made["case"] = Case(size, device)
        return {"weights": sum(p.numel() for p in made["case"].world.model.parameters())}

    report.part("build", 60, build)
    if "case" not in made:
        return report.content
    case, G = made["case"], size.candidates
    found = report.part("context", 60, lambda: measure_context(case, report, repeats))
    if "seconds" not in found:
        return report.content
    step = case.work["step"] / case.work["context"] * found["seconds"]  # a guess until it is measured
    case.kept = case.context()
    found = report.part("step", (1 + repeats) * (1 + G) * step, lambda: measure_step(case, report, repeats))
    step = found.get("seconds_batch_1", step)
    report.part(
        "clip",
        4 * step * ((1 + repeats) * (1 + 2 * G) + 2 * G),
        lambda: measure_clip(case, report, repeats),
    )
    case.kept = None
    passes = 2 * size.levels * step
    report.part("update_checkpointed", 20 + 6 * passes, lambda: measure_update(case, True))
    report.part("update_plain", 20 + 5 * passes, lambda: measure_update(case, False))
    report.content["seconds"] = round(time.monotonic() - report.start, 1)
    files.write_json(report.path, report.content)
    return report.content


def main(words: list[str] | None = None) -> int:
    """Measure and write; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu_bases.json"))
    parser.add_argument("--size", choices=sorted(SIZES), default="5b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--golden", type=Path, default=Path("tests/golden"), help="folder of the stored outputs"
    )
    parser.add_argument("--seconds", type=float, default=450.0, help="time for all parts")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args(words)
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        files.write_json(arguments.out, {"run": False, "why": "not run: no GPU", "torch": torch.__version__})
        print(f"not run: no GPU (torch {torch.__version__} sees none)", file=sys.stderr)
        return DependencyError.exit_code
    run(arguments, device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
