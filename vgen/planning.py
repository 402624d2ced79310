"""What a run needs before it loads a weight: an attention kernel that works here, and memory for its worst moment."""

import dataclasses
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from vgen import memory, transforms
from vgen.families import family_of
from vgen.graph import break_even
from vgen.graph.break_even import GraphWork
from vgen.job import Job
from vgen.memory import Activations, Choice, Decode, Prediction, Side, Spread
from vgen.models.attention_backends import require_backend, what_ran
from vgen.parallel.halo import choose_axis
from vgen.requests import Request

notice = logging.getLogger("vgen.notice")


@dataclass(frozen=True)
class RunPlan:
    """What a run decided, the same on all ranks.

    ``decode``: what ``parallel.vae_strategy`` comes to, ``reason`` why, in one sentence. ``vae_split``: the side that
    bands cut, None without bands; it and ``tiles``, their number, are of the largest request. ``attention``: the
    backend, torch's own choice by name; None where nothing attends.
    """

    decode: Decode
    reason: str
    vae_split: Side | None
    tiles: int
    attention: str | None

    def active(self) -> dict[str, Any]:
        """The record's part of this."""
        return {
            "vae_strategy": self.decode,
            "vae_split": self.vae_split,
            "vae_reason": self.reason,
            "tiles": self.tiles,
            "attention": self.attention,
        }


def plan_run(job: Job, requests: Sequence[Request], device: torch.device, components: Collection[str]) -> RunPlan:
    """Check that ``requests`` can run with ``components`` on ``device``, and say on the console what they will need.

    To be called by all ranks with all requests of the job, so that all decide alike. Memory is predicted for CUDA
    devices only; elsewhere the exact decode is the automatic one.

    Raises:
        ConfigurationError, AttentionError: what does not work, with the fix.
    """
    attention = _plan_attention(job, requests[0], device) if "transformer" in components else None
    job = _as_needed(job)
    if device.type == "cuda":
        free_bytes = _least_free_bytes(device)
        prediction, choice = _predict_and_choose(job, requests, components, free_bytes)
        _say(logging.INFO, memory.describe(prediction, free_bytes))
        memory.fit(prediction, free_bytes)
    else:
        strategy = job.config.parallel.vae_strategy
        choice = _common(memory.choose_decode(strategy, spread_of(job, request)) for request in requests)
        if job.config.task.generates and (sentence := break_even.advice(job.config.graph, _graph_work(job, requests))):
            _say(logging.INFO, sentence)
    if "video_decoder" in components and (choice.falls_back or job.plan.vae_size > 1):
        _say(logging.WARNING if choice.falls_back else logging.INFO, f"decode: {choice.reason}")
    largest = max(requests, key=lambda request: request.num_frames * request.height * request.width)
    return RunPlan(
        decode=choice.decode,
        reason=choice.reason,
        vae_split=spread_of(job, largest).side if choice.decode == "halo" else None,
        tiles=_num_tiles(job, requests, choice.decode),
        attention=attention,
    )


def _graph_work(job: Job, requests: Sequence[Request]) -> GraphWork:
    """Of the first request's size, on one rank."""
    family, bench, plan = family_of(job.config), job.config.bench, job.plan
    names = family.pass_names(requests[0], job.config)
    tokens = family.limits(job.config, (requests[0],), job.architecture).video_tokens
    runs = bench.warmup + bench.repeats * -(-len(requests) // plan.data_size)
    own = -(-len(names) // plan.cfg_size)
    return GraphWork(
        kinds=min(break_even.kinds_of(names), own),
        passes=runs * job.config.sampler.steps * own,
        tokens=-(-tokens // plan.ulysses_size),
    )


def _as_needed(job: Job) -> Job:
    """The job whose ranks need as much as those of ``job``: benchmarks run everything on one rank first."""
    if not job.config.task.name.startswith("bench_"):
        return job
    parallel = dataclasses.replace(job.config.parallel, cfg_size=1, ulysses_size=1, vae_size=1)
    return dataclasses.replace(job, config=dataclasses.replace(job.config, parallel=parallel))


def _num_tiles(job: Job, requests: Sequence[Request], decode: Decode) -> int:
    if decode not in memory.TILED:
        return 1
    return max(len(transforms.plan_decode(job, request, decode)) for request in requests)


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


def spread_of(job: Job, request: Request) -> Spread:
    """How ``request`` is spread over the ranks of ``job``."""
    limits = family_of(job.config).limits(job.config, (request,), job.architecture)
    height, width, parallel = limits.latent_height, limits.latent_width, job.config.parallel
    side = parallel.vae_split
    if side == "auto":
        side = choose_axis((1, 1, 1, height, width), job.plan.vae_size)
    return Spread(
        job.plan,
        side=side,
        lines=height if side == "height" else width,
        halo_possible=job.config.model.vae.backend == "native",
        fp32_sums=parallel.tile_sum == "fp32",
    )


def predict_run(
    job: Job,
    requests: Sequence[Request],
    components: Collection[str],
    free_bytes: int,
    weights: Mapping[str, int] | None = None,
) -> Prediction:
    """The prediction of the largest request; one that has to be decoded in tiles has all decoded so.

    ``weights``: bytes by component where they are known, since counting them takes most of the time.

    Raises:
        ConfigurationError: ranks are to share what they cannot share so, or a tensor is too large for convolutions.
    """
    return _predict_and_choose(job, requests, components, free_bytes, weights)[0]


def _predict_and_choose(
    job: Job,
    requests: Sequence[Request],
    components: Collection[str],
    free_bytes: int,
    weights: Mapping[str, int] | None = None,
) -> tuple[Prediction, Choice]:
    if weights is None:
        weights = {name: transforms.component_bytes(job, name) for name in components}
    strategy, offload = job.config.parallel.vae_strategy, job.config.model.offload
    work = [_activations(job, request, components) for request in requests]
    choice = _common(
        memory.choose_decode(
            strategy, spread_of(job, request), memory.find_obstacle(weights, activations, offload, free_bytes)
        )
        for request, activations in zip(requests, work, strict=True)
    )
    for activations in work:
        memory.validate_tensors(activations, choice.decode)
    predictions = [memory.predict(weights, activations, offload, choice.decode) for activations in work]
    return max(predictions, key=lambda prediction: prediction.peak), choice


def _common(choices: Iterable[Choice]) -> Choice:
    """One decode for all requests."""
    found = list(choices)
    return next((choice for choice in found if choice.decode == "tile"), found[0])


def _captures(job: Job) -> bool:
    """Whether calls of the transformers are captured, in a row of a benchmark too."""
    graph, config = job.config.graph, job.config
    rows = config.bench.graphs if config.task.name == "bench_step" else ()
    return graph.captures or any(dataclasses.replace(graph, mode=mode).captures for mode in rows)


def _activations(job: Job, request: Request, components: Collection[str]) -> Activations:
    idle = [stage for stage, names in memory.STAGE_WEIGHTS.items() if not set(names) & set(components)]
    work = transforms.activations(job, request, components, spread_of(job, request))
    graph, transformers = job.config.graph, set(memory.STAGE_WEIGHTS["denoise"]) & set(components)
    if _captures(job) and transformers:
        work = work.with_graphs(len(transformers), whole_steps=graph.scope == "step")
    return work.without(idle)
