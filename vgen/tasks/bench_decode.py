"""``task=bench_decode``: whole and tiled decode of one request's size, and bench.peers, in one process."""

from typing import Any, cast

import torch
from torch import Tensor

from vgen import planning, transforms
from vgen.components import ltx2
from vgen.metrics.timer import StageTimer
from vgen.models.ltx2.video_vae import VideoDecoder
from vgen.parallel.tiles import decode_tiled
from vgen.stages.latents import latent_geometry, make_noise, unpack_video
from vgen.tasks import bench_wan, peers
from vgen.tasks.bench import write_bench
from vgen.tasks.measure import Measurement, measure, relative_error
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
    rows, errors = [], {}
    with torch.no_grad():

        def whole() -> Tensor:
            return decoder(latents)

        def tiled() -> list[Tensor]:
            return list(decode_tiled(decoder, latents, tiles))

        rows.append(measure("vgen whole", whole, device, warmup=bench.warmup, repeats=bench.repeats))
        reference = whole().cpu()
        rows.append(measure(f"vgen {len(tiles)} tiles", tiled, device, warmup=bench.warmup, repeats=bench.repeats))
        errors[f"vgen {len(tiles)} tiles"] = relative_error(torch.cat(tiled(), dim=2).cpu(), reference)
        if "diffusers" in bench.peers:
            row, error = _bench_diffusers(context, decoder, latents, reference)
            rows.append(row)
            errors[row.name] = error
    write_bench(job.out_dir, rows, errors, baseline=rows[-1].name, against="vgen whole")
    return result


def _bench_diffusers(
    context: TaskContext, decoder: VideoDecoder, latents: Tensor, reference: Tensor
) -> tuple[Measurement, float]:
    bench, config = context.job.config.bench, context.job.architecture.video_decoder
    # The peer keeps its own memory format: its weights as it would load them, contiguous.
    peer = peers.diffusers_video_decoder(decoder, config)
    for parameter in peer.parameters():
        parameter.data = parameter.data.contiguous()

    def decode() -> Tensor:
        frames: Tensor = cast(Any, peer).decode(decoder.per_channel_statistics(latents), return_dict=False)[0]
        return frames

    row = measure("diffusers whole", decode, context.device, warmup=bench.warmup, repeats=bench.repeats)
    return row, relative_error(reference, decode().cpu())
