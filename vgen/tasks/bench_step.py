"""``task=bench_step``: one transformer forward of one request's size, and bench.peers, in one process."""

import torch
from torch import Tensor, nn

from vgen import transforms
from vgen.metrics.timer import StageTimer
from vgen.models.ltx2.geometry import Geometry
from vgen.models.ltx2.transformer import LTX2Transformer, Stream
from vgen.stages.latents import Latents, latent_geometry, make_noise
from vgen.tasks import peers
from vgen.tasks.bench import write_bench
from vgen.tasks.measure import measure, relative_error
from vgen.tasks.types import RankResult, TaskContext

SIGMA = 0.5


def run(context: TaskContext) -> RankResult:
    """One conditional pass at sigma 0.5, batch 1, random latents and context; errors are shown before times."""
    job, device, bench = context.job, context.device, context.job.config.bench
    dtype = transforms.DTYPES[job.config.quant.mode]
    timer, result = StageTimer(device), RankResult()
    with timer("load"):
        transformer = transforms.build_transformer(job, device)
    result.add_once(timer)
    geometry = latent_geometry(job.requests[0])
    latents = make_noise(geometry, job.architecture, seed=job.requests[0].seed, device=device, dtype=dtype)
    assert latents.audio is not None
    length, width = job.config.model.text_encoder.max_length, job.architecture.transformer.caption_channels
    text = torch.randn(1, length, width, generator=torch.Generator().manual_seed(0)).to(device, dtype)

    def ours() -> tuple[Tensor, Tensor]:
        return _forward(transformer, geometry, latents, text)

    errors, rows = {}, []
    with torch.no_grad():
        rows.append(measure("vgen eager", ours, device, warmup=bench.warmup, repeats=bench.repeats))
        reference = ours()
        if "diffusers" in bench.peers:
            peer = peers.diffusers_transformer(transformer, job.architecture.transformer)

            def theirs() -> tuple[Tensor, Tensor]:
                return _forward_diffusers(peer, geometry, latents, text)

            rows.append(measure("diffusers eager", theirs, device, warmup=bench.warmup, repeats=bench.repeats))
            errors["diffusers eager"] = max(
                relative_error(mine, other) for mine, other in zip(reference, theirs(), strict=True)
            )
    write_bench(job.out_dir, rows, errors, baseline=rows[-1].name, against="vgen eager")
    return result


def _forward(transformer: LTX2Transformer, geometry: Geometry, latents: Latents, text: Tensor) -> tuple[Tensor, Tensor]:
    sigma = torch.full((1,), SIGMA, device=text.device)
    rope = transformer.rope_tables(geometry, text.device, text.dtype)
    assert latents.audio is not None
    video, audio = transformer(
        Stream(latents.video, timestep=sigma, sigma=sigma, context=text),
        Stream(latents.audio, timestep=sigma, sigma=sigma, context=text),
        rope,
    )
    return video, audio


def _forward_diffusers(peer: nn.Module, geometry: Geometry, latents: Latents, text: Tensor) -> tuple[Tensor, Tensor]:
    sigma = torch.full((1,), SIGMA, device=text.device) * 1000
    video, audio = peer(
        hidden_states=latents.video,
        audio_hidden_states=latents.audio,
        encoder_hidden_states=text,
        audio_encoder_hidden_states=text,
        timestep=sigma,
        sigma=sigma,
        num_frames=geometry.latent_frames,
        height=geometry.latent_height,
        width=geometry.latent_width,
        fps=geometry.fps,
        audio_num_frames=geometry.audio_tokens,
        return_dict=False,
    )
    return video, audio
