"""``task=bench_encode``: encode of one clip of a request's size, and bench.peers, in one process."""

from typing import Any, cast

import torch
from torch import Tensor

from vgen import planning, transforms
from vgen.components import ltx2
from vgen.metrics.timer import StageTimer
from vgen.tasks import bench_wan, peers
from vgen.tasks.bench import write_bench
from vgen.tasks.measure import measure, relative_error
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
    rows, errors = [], {}
    with torch.no_grad():

        def ours() -> Tensor:
            latents: Tensor = encoder(frames)
            return latents

        rows.append(measure("vgen whole", ours, device, warmup=bench.warmup, repeats=bench.repeats))
        reference = ours().cpu()
        if "diffusers" in bench.peers:
            peer = peers.diffusers_video_encoder(encoder, job.architecture.video_encoder)
            # The peer keeps its own memory format: its weights as it would load them, contiguous.
            for parameter in peer.parameters():
                parameter.data = parameter.data.contiguous()

            def theirs() -> Tensor:
                latents: Tensor = cast(Any, peer).encode(frames, return_dict=False)[0].mode()
                return latents

            rows.append(measure("diffusers whole", theirs, device, warmup=bench.warmup, repeats=bench.repeats))
            statistics = encoder.per_channel_statistics
            errors["diffusers whole"] = relative_error(reference, statistics.normalize(theirs()).cpu())
    write_bench(job.out_dir, rows, errors, baseline=rows[-1].name, against="vgen whole")
    return result
