"""``task=bench_decode``: whole and tiled decode of one request's size, over ranks too, and bench.peers."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from vgen import planning, transforms
from vgen.components import ltx2
from vgen.components.ranks import VaeShare
from vgen.families.ltx2 import tile_settings
from vgen.job import Job
from vgen.metrics.timer import StageTimer
from vgen.models.ltx2.video_vae import VideoDecoder
from vgen.parallel.tiles import decode_tiled
from vgen.stages.latents import latent_geometry, make_noise, unpack_video
from vgen.tasks import bench_wan, peers
from vgen.tasks.bench import Bench, shares, timed_and_joined
from vgen.tasks.types import RankResult, TaskContext


def run(context: TaskContext) -> RankResult:
    return (bench_wan.decode if context.job.config.model.family == "wan" else _run_ltx2)(context)


def _run_ltx2(context: TaskContext) -> RankResult:
    """Random latents from ``request.seed``; errors are shown before times."""
    job, device, bench = context.job, context.device, context.job.config.bench
    request = job.requests[0]
    dtype = transforms.component_dtype(job, "video_decoder", device)
    timer, result = StageTimer(device), RankResult()
    planning.plan_run(job, job.requests, device, ("video_decoder",))
    with timer("load"):
        decoder = ltx2.build_video_decoder(job, device)
    result.add_once(timer)
    geometry = latent_geometry(request)
    latents = unpack_video(
        make_noise(geometry, job.architecture, seed=request.seed, device=device, dtype=dtype).video, geometry
    )
    tiles = transforms.plan_decode(job, request)
    rows = Bench(context)
    with torch.no_grad():
        rows.row("vgen whole", lambda: decoder(latents))
        rows.row(f"vgen {len(tiles)} tiles", *timed_and_joined(lambda: decode_tiled(decoder, latents, tiles)))

        def shared(share: VaeShare) -> tuple[Callable[[], object], Callable[[], Tensor | None]]:
            return timed_and_joined(partial(ltx2.build_decode(decoder, share), latents))

        ways = shares(
            context, tile_settings(job.config), (latents.shape[3], latents.shape[4]), ("halo", "tile", "tile_balanced")
        )
        rows.rows_over_ranks(ways, shared)
        if "diffusers" in bench.peers:
            peer = _peer(decoder, job) if context.is_first else None

            def theirs() -> Tensor:
                normal = decoder.per_channel_statistics(latents)
                frames: Tensor = cast(Any, peer).decode(normal, return_dict=False)[0]
                return frames

            rows.row("diffusers whole", theirs)
    rows.write()
    return result


def _peer(decoder: VideoDecoder, job: Job) -> nn.Module:
    """Its own memory format: its weights as it would load them, contiguous."""
    peer = peers.diffusers_video_decoder(decoder, job.architecture.video_decoder)
    for parameter in peer.parameters():
        parameter.data = parameter.data.contiguous()
    return peer
