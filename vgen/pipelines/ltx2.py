"""LTX-2, one stage: text, images, a clip and a sound to video with sound."""

import dataclasses

from torch import Tensor

from vgen.config import GuidanceConfig, SamplerConfig
from vgen.diffusion.guidance import Guidance
from vgen.diffusion.schedule import build_sigmas, sigmas_from_list, start_at
from vgen.metrics.timer import Timer, null_timer
from vgen.models.ltx2.geometry import Geometry
from vgen.pipelines.types import Components, Decoders, Follower, Sink
from vgen.progress import progress
from vgen.requests import Request
from vgen.residency import Residency
from vgen.stages.checks import check_finite
from vgen.stages.condition import EncodedImage
from vgen.stages.decode import Sound, decode_audio, write_frames
from vgen.stages.denoise import Conditioning, denoise
from vgen.stages.encode import encode_clip, encode_images, encode_sound, kept_sound
from vgen.stages.latents import Latents, latent_geometry, make_noise, unpack_audio, unpack_video
from vgen.stages.passes import Pass, needs_negative, plan_passes
from vgen.stages.start import Inputs, start_latents


def generate(
    components: Components, request: Request, sampler: SamplerConfig, sink: Sink, timer: Timer = null_timer
) -> None:
    """One request to its files; latents reach ``sink`` before anything is decoded.

    Raises:
        NumericsError: NaN or infinity after the first step or before decode.
    """
    geometry = latent_geometry(request)
    passes = plan_request_passes(request, sampler)
    prompts = [request.prompt, request.negative_prompt] if needs_negative(passes) else [request.prompt]
    with timer("text_encode"):
        contexts = components.encode_prompts(prompts)

    inputs, sound = _encode(components, request, geometry, timer)
    sigmas = request_sigmas(request, sampler, geometry)
    noise = make_noise(
        geometry, components.architecture, seed=request.seed, device=components.device, dtype=components.dtype
    )
    copies = request.audio == "copy"
    # Official schedules begin a bit below 1, and their noise is all of the start nevertheless.
    noise_level = 1.0 if request.video is None else request.noise_level
    latents, conditions = start_latents(geometry, inputs, noise, noise_level, audio_is_given=copies)
    conditioning = Conditioning(
        geometry=geometry,
        passes=passes,
        contexts=dict(zip(("positive", "negative"), contexts, strict=False)),
        video_guidance=make_guidance(sampler.video),
        audio_guidance=make_guidance(sampler.audio),
        video=conditions,
        audio_is_given=copies,
    )
    with timer("denoise"), components.residency.use("transformer"), progress("denoise", len(sigmas) - 1) as bar:

        def on_step(step: int, latents: Latents) -> None:
            timer.step()
            bar.advance(1)
            if step == 0:
                check_finite("the video latents", latents.video, "after step 1")
                check_finite("the audio latents", latents.audio, "after step 1")

        latents = denoise(components.make_step(conditioning), latents, sigmas.to(components.device), on_step)

    video_latents = unpack_video(latents.video, geometry)
    audio_latents = None
    if latents.audio is not None:
        audio_latents = unpack_audio(latents.audio, components.architecture.audio_decoder.latent_mel_bins)
    components.hand_over(video_latents)
    sink.save_latents(video_latents, audio_latents)
    if components.decoders is not None:
        decode(components.decoders, video_latents, audio_latents, sink, components.residency, timer, kept=sound)


def follow(follower: Follower, request: Request, sink: Sink, timer: Timer = null_timer) -> None:
    """One request on a rank that only decodes: its part of the encode and of the decode.

    Raises:
        NumericsError: NaN or infinity before decode.
    """
    if follower.encode_video is not None and (request.images or request.video):
        with timer("encode_video"), follower.residency.use("video_encoder"):
            encode_images(follower.encode_video, request, follower.device, follower.dtype)
            encode_clip(follower.encode_video, request, follower.device, follower.dtype)
    # Not a stage of its own: the time of this is that of the ranks that denoise.
    decode(follower.decoders, follower.receive(), None, sink, follower.residency, timer)


def _encode(components: Components, request: Request, geometry: Geometry, timer: Timer) -> tuple[Inputs, Sound | None]:
    """The request's images, clip and sound as latents; and the sound itself where the file keeps it."""
    encoders, device, dtype = components.encoders, components.device, components.dtype
    if encoders is None:
        return Inputs(), None
    images: tuple[EncodedImage, ...] = ()
    clip = audio = None
    if request.images or request.video:
        with timer("encode_video"), components.residency.use("video_encoder"):
            images = encode_images(encoders.video, request, device, dtype)
            clip = encode_clip(encoders.video, request, device, dtype)
    if request.sound_source:
        with timer("encode_audio"), components.residency.use("audio_encoder"):
            audio = encode_sound(encoders.audio, request, geometry, device, dtype)
    return Inputs(images, clip, audio), kept_sound(request)


def plan_request_passes(request: Request, sampler: SamplerConfig) -> tuple[Pass, ...]:
    """The passes of every step; a sound that is given is not guided."""
    video = make_guidance(sampler.video)
    if request.audio == "none":
        return plan_passes(video, None)
    if request.audio == "copy":
        return plan_passes(video, Guidance(), audio_is_given=True)
    return plan_passes(video, make_guidance(sampler.audio))


def make_guidance(config: GuidanceConfig) -> Guidance:
    return Guidance(**dataclasses.asdict(config))


def request_sigmas(request: Request, sampler: SamplerConfig, geometry: Geometry) -> Tensor:
    """The schedule, from the clip's noise level on where there is a clip."""
    if sampler.sigmas is not None:
        sigmas = sigmas_from_list(sampler.sigmas)
    else:
        sigmas = build_sigmas(sampler.steps, schedule=sampler.schedule, video_tokens=geometry.video_tokens)
    return sigmas if request.video is None else start_at(sigmas, request.noise_level)


def decode(
    decoders: Decoders,
    video: Tensor,
    audio: Tensor | None,
    sink: Sink,
    residency: Residency,
    timer: Timer = null_timer,
    kept: Sound | None = None,
) -> None:
    """Latents to files: ``video`` ``[1, C, F, H, W]``, ``audio`` ``[1, C, T, M]`` or None.

    ``kept`` is a sound that came with the request and takes the place of what ``audio`` would sound like.

    Raises:
        NumericsError: NaN or infinity in the latents or the waveform.
    """
    check_finite("the video latents", video, "before decode")
    check_finite("the audio latents", audio, "before decode")
    sound = kept
    if audio is not None and kept is None and decoders.audio is not None:
        with timer("decode_audio"), residency.use("audio_decoder", "vocoder"):
            sound = decode_audio(decoders.audio, audio)
        check_finite("the waveform", sound.waveform, "after the vocoder")
    with timer("write"), residency.use("video_decoder"):
        fallback = write_frames(
            lambda frames: sink.write(frames, sound), decoders.decode_video, decoders.fallbacks, video, timer
        )
    if fallback is not None:
        sink.note_fallback(fallback)
