"""The work of Wan's stages at their worst moments, in bytes: what ``vgen.memory`` adds weights to. Needs no torch.

What is alive at a worst moment was read off the modules, whose tensors are named here; the constants are what no module
shows.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from vgen.memory import CONVOLUTION_WORKSPACE, FP32_BYTES, Activations
from vgen.models.wan.config import Residual, WanArchitecture, WanTransformerConfig, WanVaeConfig
from vgen.models.wan.geometry import Geometry
from vgen.models.wan.vae_levels import (
    Level,
    decoder_levels,
    encoder_levels,
    most_decoder_frames,
    most_encoder_frames,
)
from vgen.parallel.tiles import Tile

SOLVER_TENSORS = 10
"""fp32 copies of the latents between solver, guidance and passes: the solver alone carries three."""

HISTORY = 2
"""Frames that a convolution keeps for the next chunk."""


def estimate(
    architecture: WanArchitecture,
    geometry: Geometry,
    text: Mapping[str, Any],
    tiles: Sequence[Tile],
    *,
    text_tokens: int,
    value_bytes: int,
    contexts: int,
    chunk: int | None,
    encoded_frames: int = 0,
    residual: Residual = "fp32",
    held: bool = False,
) -> Activations:
    """The work of every stage of one request of batch 1, its guidance passes one after another.

    Args:
        text: UMT5's sizes.
        tiles: the plan of a tiled decode.
        value_bytes: 4 in fp32, 2 in bf16.
        contexts: prompts that guidance needs, 1 or 2.
        chunk: latent frames that the VAE takes at a time; None as many as convolutions can.
        encoded_frames: pixel frames of the clip that the encoder gets, 0 for none.
        held: whether tokens have timesteps of their own, as with a first frame.
    """
    latents = (geometry.latent_frames, geometry.latent_height, geometry.latent_width)
    vae = architecture.vae
    encode = 0
    if encoded_frames:
        encoded = ((encoded_frames - 1) // vae.scale_factor_temporal + 1, *latents[1:])
        encode = encode_bytes(vae, encoded, chunk, value_bytes)
    shapes = {tuple(span.latent_stop - span.latent_start for span in (t.time, t.height, t.width)) for t in tiles}
    clip = 3 * prod(_pixels(vae, latents)) * value_bytes
    return Activations(
        text_encode=text_bytes(text, text_tokens, value_bytes),
        encode_video=encode,
        encode_audio=0,
        denoise=denoise_bytes(
            architecture.transformer, geometry, text_tokens, contexts, value_bytes, residual=residual, held=held
        ),
        decode_video_whole=decode_bytes(vae, latents, chunk, value_bytes),
        # The sum over tiles beside the finished frames, and a tile's frames.
        decode_video_tile=max(decode_bytes(vae, shape, chunk, value_bytes) for shape in shapes) + 3 * clip,
        decode_audio=0,
        kept=rope_bytes(architecture.transformer, geometry),
        largest_decode_tensor=0,  # chunks are as short as convolutions need
        largest_encode_tensor=0,
    )


def text_bytes(text: Mapping[str, Any], tokens: int, value_bytes: int) -> int:
    """One prompt at a time. Worst in attention: scores, their bias and their softmax in fp32."""
    scores = text["num_heads"] * tokens**2 * (2 * value_bytes + 2 * FP32_BYTES)
    return scores + tokens * (3 * text["d_model"] + 3 * text["d_ff"]) * value_bytes


def rope_bytes(config: WanTransformerConfig, geometry: Geometry) -> int:
    """Cosines and sines, the same for all heads."""
    return geometry.video_tokens * config.attention_head_dim * FP32_BYTES


def denoise_bytes(
    config: WanTransformerConfig,
    geometry: Geometry,
    text_tokens: int,
    contexts: int,
    value_bytes: int,
    *,
    residual: Residual,
    held: bool,
) -> int:
    """Worst in self-attention or in the feed-forward, whichever is larger.

    The block's input, the stream, its modulated norm; and in self-attention keys, turned and being turned in
    fp32, queries and values, in the feed-forward the hidden layer before and after GELU. Where tokens have timesteps of
    their own, shift, scale and gate are fp32 rows for each token. The text's keys and values of every block are there
    too, once per prompt.
    """
    tokens, width = geometry.video_tokens, config.width
    stream_bytes = FP32_BYTES if residual == "fp32" else value_bytes
    stream = tokens * width * (2 * stream_bytes + value_bytes)
    attention = tokens * width * (2 * FP32_BYTES + 3 * value_bytes)
    feed_forward = 2 * tokens * config.ffn_dim * value_bytes
    modulating = tokens * width * (2 * FP32_BYTES)
    rows = 3 * tokens * width * FP32_BYTES if held else 0
    text = contexts * text_tokens * 2 * config.num_layers * width * value_bytes
    latents = prod(geometry.patch_size) * tokens * (config.out_channels * SOLVER_TENSORS + config.in_channels)
    worst = max(attention, feed_forward, modulating)
    return stream + worst + rows + text + latents * FP32_BYTES + rope_bytes(config, geometry)


def decode_bytes(vae: WanVaeConfig, latents: tuple[int, ...], chunk: int | None, value_bytes: int) -> int:
    """Of one chunk of the decoder on ``latents`` (frames, height, width), with what chunks leave each other."""
    most = most_decoder_frames(vae, (1, vae.z_dim, *latents))
    frames = max(1, min(most, latents[0], chunk or most))
    peak = max(sum(alive) for alive in _decode_moments(vae, (frames, *latents[1:])))
    state = _state(decoder_levels(vae), latents[1:], vae, decoding=True)
    # The latents of all frames, raw and normalized in fp32, and the frames of the last chunk in the writer's hands.
    beside = 2 * prod(latents) * vae.z_dim * FP32_BYTES
    written = 3 * frames * vae.scale_factor_temporal * prod(_pixels(vae, (1, *latents[1:]))[1:]) * 2 * value_bytes
    return (peak + 2 * state) * value_bytes + beside + written + CONVOLUTION_WORKSPACE


def encode_bytes(vae: WanVaeConfig, latents: tuple[int, ...], chunk: int | None, value_bytes: int) -> int:
    """Of one chunk of the encoder on the clip of ``latents`` (frames, height, width), which is there twice."""
    most = most_encoder_frames(vae, (1, vae.z_dim, *latents))
    frames = max(1, min(most, latents[0], chunk or most))
    peak = max(sum(alive) for alive in _encode_moments(vae, (frames, *latents[1:])))
    state = _state(encoder_levels(vae), latents[1:], vae, decoding=False)
    clip = 3 * prod(_pixels(vae, latents)) * (FP32_BYTES + value_bytes)
    return (peak + 2 * state) * value_bytes + clip + CONVOLUTION_WORKSPACE


def _pixels(vae: WanVaeConfig, latents: tuple[int, ...]) -> tuple[int, int, int]:
    frames, height, width = latents
    space = vae.scale_factor_spatial
    return (frames - 1) * vae.scale_factor_temporal + 1, height * space, width * space


def _decode_moments(vae: WanVaeConfig, size: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Elements of the tensors that are alive together, at each moment that can be the worst."""
    frames, height, width = size
    levels = decoder_levels(vae)
    yield from _attention_moments(prod(size), levels[0].in_channels)
    for level in levels:
        yield from _resnet_moments(level, (frames, height, width))
        entered = frames * height * width * level.in_channels
        if level.space == 1:
            continue
        x = frames * height * width * level.channels
        phases = x * level.time
        if level.time > 1:
            yield entered, x, (frames + HISTORY) * height * width * level.channels, phases
        frames, height, width = frames * level.time, 2 * height, 2 * width
        bordered = frames * (height + 2) * (width + 2) * level.channels
        yield entered, x, phases if level.time > 1 else 0, bordered
        yield entered, x, bordered, frames * height * width * level.resampled
    x = frames * height * width * levels[-1].channels
    out = frames * height * width * vae.out_channels
    yield x, _bordered(frames, height, width) * levels[-1].channels, out
    yield x, out, out


def _encode_moments(vae: WanVaeConfig, size: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    patch, levels = vae.patch_size or 1, encoder_levels(vae)
    frames, *space = size
    frames *= vae.scale_factor_temporal
    height, width = (n * vae.scale_factor_spatial // patch for n in space)
    yield _bordered(frames, height, width) * vae.in_channels, frames * height * width * levels[0].in_channels
    for level in levels:
        yield from _resnet_moments(level, (frames, height, width))
        if level.space > 1:
            entered = frames * height * width * level.in_channels
            x = frames * height * width * level.channels
            bordered = frames * (height + 1) * (width + 1) * level.channels
            height, width = height // 2, width // 2
            yield entered, x, bordered, frames * height * width * level.resampled
            frames //= level.time
    yield from _attention_moments(frames * height * width, levels[-1].channels)


def _resnet_moments(level: Level, size: tuple[int, int, int]) -> Iterator[tuple[int, ...]]:
    """What enters a level lives until it is left. In a block: its input, a bordered norm, what it makes."""
    entered, x = prod(size) * level.in_channels, prod(size) * level.channels
    yield entered, _bordered(*size) * level.in_channels, x
    yield entered, _bordered(*size) * level.channels, x
    yield entered, x, _bordered(*size) * level.channels, x


def _attention_moments(tokens: int, channels: int) -> Iterator[tuple[int, ...]]:
    """Input, norm, queries, keys and values together, output."""
    yield tokens * channels, tokens * channels, 3 * tokens * channels, tokens * channels


def _state(levels: Sequence[Level], space: Sequence[int], vae: WanVaeConfig, *, decoding: bool) -> int:
    """Elements that one chunk leaves to the next: the last frames of what every convolution along time read."""
    scale = 1 if decoding else vae.scale_factor_spatial // (vae.patch_size or 1)
    height, width = (n * scale for n in space)
    blocks = vae.num_res_blocks + decoding
    total = 0
    for level in levels:
        frame = (height + 2) * (width + 2)
        total += HISTORY * frame * (level.in_channels + (2 * blocks - 1) * level.channels)
        if level.time > 1:
            total += HISTORY * height * width * level.channels
        if level.space > 1:
            height, width = (2 * height, 2 * width) if decoding else (height // 2, width // 2)
    middle = levels[0].in_channels if decoding else levels[-1].channels
    return total + 4 * HISTORY * middle * prod(n + 2 for n in space)


def _bordered(frames: int, height: int, width: int) -> int:
    return (frames + HISTORY) * (height + 2) * (width + 2)
