"""What a run needs before it loads a weight: an attention kernel that works here, and memory for its worst moment."""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from vgen import memory, transforms
from vgen.job import Job
from vgen.memory import Activations, Decode, Prediction
from vgen.models.attention_backends import require_backend, what_ran
from vgen.requests import Request

notice = logging.getLogger("vgen.notice")


@dataclass(frozen=True)
class RunPlan:
    """``decode``: what ``parallel.vae_strategy`` comes to, the same on all ranks; ``tiles``: of the largest request.

    ``attention``: the backend, torch's own choice by name; None where nothing attends.
    """

    decode: Decode
    tiles: int
    attention: str | None

    def active(self) -> dict[str, Any]:
        """The record's part of this."""
        return {"vae_strategy": self.decode, "tiles": self.tiles, "attention": self.attention}


def plan_run(job: Job, requests: Sequence[Request], device: torch.device, components: Collection[str]) -> RunPlan:
    """Check that ``requests`` can run with ``components`` on ``device``, and say on the console what they will need.

    To be called by all ranks with all requests of the job, so that all decide alike. Memory is predicted for CUDA
    devices only; elsewhere the exact decode is the automatic one.

    Raises:
        ConfigurationError, AttentionError: what does not work, with the fix.
    """
    attention = _plan_attention(job, requests[0], device) if "transformer" in components else None
    decode: Decode = "tile" if job.config.parallel.vae_strategy == "tile" else "whole"
    if device.type == "cuda":
        free_bytes = _least_free_bytes(device)
        prediction = predict_run(job, requests, components, free_bytes)
        _say(logging.INFO, memory.describe(prediction, free_bytes))
        memory.fit(prediction, free_bytes)
        decode = prediction.decode
    tiles = max(len(transforms.plan_decode(job, request)) for request in requests) if decode == "tile" else 1
    return RunPlan(decode, tiles, attention)


def _least_free_bytes(device: torch.device) -> int:
    """Free memory of the rank that has least, before anything is loaded."""
    free_bytes, _ = torch.cuda.mem_get_info(device)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return free_bytes
    least = torch.tensor(free_bytes, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return int(least)


def _say(level: int, sentence: str) -> None:
    """Once, though all ranks plan."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        notice.log(level, sentence)


def _plan_attention(job: Job, request: Request, device: torch.device) -> str:
    """The kernel of the video's self-attention."""
    sizes, name = transforms.attention_sizes(job, request), job.config.model.attention
    dtype = transforms.DTYPES[job.config.quant.mode]
    require_backend(name, device, dtype, {sizes.head_dim, *sizes.other_head_dims})
    return what_ran(name, device, dtype, num_heads=sizes.num_heads, head_dim=sizes.head_dim, tokens=sizes.tokens)


def predict_run(job: Job, requests: Sequence[Request], components: Collection[str], free_bytes: int) -> Prediction:
    """The prediction of the largest request; one that has to be decoded in tiles has all decoded so."""
    weights = {name: transforms.component_bytes(job, name) for name in components}
    strategy, offload = job.config.parallel.vae_strategy, job.config.model.offload
    predictions = []
    for request in requests:
        activations = _activations(job, request, components)
        prediction, sentence = memory.choose_decode(strategy, weights, activations, offload, free_bytes)
        if sentence is not None:
            _say(logging.WARNING, sentence)
        predictions.append(prediction)
    if any(prediction.decode == "tile" for prediction in predictions):
        predictions = [memory.predict(weights, each.activations, offload, "tile") for each in predictions]
    return max(predictions, key=lambda prediction: prediction.peak)


def _activations(job: Job, request: Request, components: Collection[str]) -> Activations:
    idle = [stage for stage, names in memory.STAGE_WEIGHTS.items() if not set(names) & set(components)]
    return transforms.activations(job, request, components).without(idle)
