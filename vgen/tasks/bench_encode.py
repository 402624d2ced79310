"""``task=bench_encode``: encode of one clip of a request's size, and bench.peers, in one process."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from vgen import planning, transforms
from vgen.components import ltx2
from vgen.components.ranks import VaeShare
from vgen.families.ltx2 import tile_settings
from vgen.job import Job
from vgen.metrics.timer import StageTimer
from vgen.models.ltx2.video_encoder import VideoEncoder
from vgen.tasks import bench_wan, peers
from vgen.tasks.bench import Bench, shares
from vgen.tasks.types import RankResult, TaskContext


def run(context: TaskContext) -> RankResult:
    return (bench_wan.encode if context.job.config.model.family == "wan" else _run_ltx2)(context)


def _run_ltx2(context: TaskContext) -> RankResult:
    """Random pixels from ``request.seed``; errors are shown before times."""
    job, device, bench = context.job, context.device, context.job.config.bench
    request = job.requests[0]
    dtype = transforms.component_dtype(job, "video_encoder", device)
    timer, result = StageTimer(device), RankResult()
    planning.plan_run(job, job.requests, device, ("video_encoder",))
    with timer("load"):
        encoder = ltx2.build_video_encoder(job, device)
    result.add_once(timer)
    generator = torch.Generator().manual_seed(request.seed)
    shape = (1, 3, request.num_frames, request.height, request.width)
    frames = (2 * torch.rand(shape, generator=generator) - 1).to(device, dtype)
    rows = Bench(context)
    settings = tile_settings(job.config)
    sizes = (request.height // settings.compression[1], request.width // settings.compression[2])
    with torch.no_grad():
        rows.row("vgen whole", lambda: encoder(frames))

        def shared(share: VaeShare) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
            adapted = share.adapt(encoder)
            return (lambda: adapted(frames),) * 2

        rows.rows_over_ranks(shares(context, settings, sizes, ("halo",)), shared)
        if "diffusers" in bench.peers:
            peer = _peer(encoder, job) if context.is_first else None

            def theirs() -> Tensor:
                latents: Tensor = cast(Any, peer).encode(frames, return_dict=False)[0].mode()
                return latents

            rows.row("diffusers whole", theirs, lambda: encoder.per_channel_statistics.normalize(theirs()))
    rows.write()
    return result


def _peer(encoder: VideoEncoder, job: Job) -> nn.Module:
    """Its own memory format: its weights as it would load them, contiguous."""
    peer = peers.diffusers_video_encoder(encoder, job.architecture.video_encoder)
    for parameter in peer.parameters():
        parameter.data = parameter.data.contiguous()
    return peer
