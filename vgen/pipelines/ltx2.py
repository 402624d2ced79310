"""LTX-2, one stage: prompt to video with sound."""

from collections.abc import Iterator

from torch import Tensor

from vgen.config import SamplerConfig
from vgen.diffusion.guidance import Guidance, needs_uncond
from vgen.diffusion.schedule import build_sigmas
from vgen.metrics.timer import Timer, null_timer
from vgen.pipelines.types import Components, Decoders, Sink
from vgen.progress import progress
from vgen.requests import Request
from vgen.stages.checks import check_finite
from vgen.stages.decode import decode_audio
from vgen.stages.denoise import Conditioning, denoise
from vgen.stages.latents import Latents, latent_geometry, make_noise, unpack_audio, unpack_video
from vgen.stages.text import encode_prompts


def generate(
    components: Components, request: Request, sampler: SamplerConfig, sink: Sink, timer: Timer = null_timer
) -> None:
    """Text to video with sound; latents reach ``sink`` before anything is decoded.

    Raises:
        NumericsError: NaN or infinity after the first step or before decode.
    """
    geometry = latent_geometry(request)
    video_guidance = Guidance(sampler.video.cfg_scale, sampler.video.rescale_scale)
    audio_guidance = Guidance(sampler.audio.cfg_scale, sampler.audio.rescale_scale)
    guidances = [video_guidance, audio_guidance] if request.audio else [video_guidance]
    prompts = [request.prompt, request.negative_prompt] if needs_uncond(*guidances) else [request.prompt]

    with timer("text_encode"):
        contexts = encode_prompts(components.text, prompts, components.device)
    uncond = contexts[1] if len(contexts) > 1 else None
    predict = components.make_predict(Conditioning(geometry, contexts[0], uncond, video_guidance, audio_guidance))

    sigmas = build_sigmas(sampler.steps, schedule=sampler.schedule, video_tokens=geometry.video_tokens)
    noise = make_noise(
        geometry, components.architecture, seed=request.seed, device=components.device, dtype=components.dtype
    )
    with timer("denoise"), progress("denoise", sampler.steps) as bar:

        def on_step(step: int, latents: Latents) -> None:
            timer.step()
            bar.advance(1)
            if step == 0:
                check_finite("the video latents", latents.video, "after step 1")
                check_finite("the audio latents", latents.audio, "after step 1")

        latents = denoise(predict, noise, sigmas.to(components.device), on_step)

    video = unpack_video(latents.video, geometry)
    audio = None
    if latents.audio is not None:
        audio = unpack_audio(latents.audio, components.architecture.audio_decoder.latent_mel_bins)
    sink.save_latents(video, audio)
    decode(components.decoders, video, audio, sink, timer)


def decode(decoders: Decoders, video: Tensor, audio: Tensor | None, sink: Sink, timer: Timer = null_timer) -> None:
    """Latents to files: ``video`` ``[1, C, F, H, W]``, ``audio`` ``[1, C, T, M]`` or None.

    Raises:
        NumericsError: NaN or infinity in the latents or the waveform.
    """
    check_finite("the video latents", video, "before decode")
    check_finite("the audio latents", audio, "before decode")
    waveform = None
    if audio is not None:
        with timer("decode_audio"):
            waveform = decode_audio(decoders.audio, audio)
        check_finite("the waveform", waveform, "after the vocoder")
    with timer("write"):
        sink.write(_timed(decoders.decode_video(video), timer), waveform)


def _timed(frames: Iterator[Tensor], timer: Timer) -> Iterator[Tensor]:
    """Frames are decoded as the writer asks for them; their time counts as decode, the rest as write."""
    while True:
        with timer("decode_video"):
            group = next(frames, None)
        if group is None:
            return
        yield group
