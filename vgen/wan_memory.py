"""The work of Wan's stages at their worst moments, in bytes: what ``vgen.memory`` adds weights to. Needs no torch.

What is alive at a worst moment was read off the modules, whose tensors are named here; the constants are what no module
shows.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from vgen.memory import (
    ALONE,
    CONVOLUTION_WORKSPACE,
    DIVIDED_FRAMES,
    FP32_BYTES,
    Activations,
    Decode,
    Spread,
    VaeWork,
)
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

SHARED_ATTENTION_TENSORS = 3 + 3 + 3
"""Of a rank's tokens, in attention over the ranks of Ulysses: queries, keys and values, the same as they are sent, and
as received, the tokens of all ranks for a part of the heads; or in place of those sent the output, three times."""

HISTORY = 2
"""Frames that a convolution keeps for the next chunk."""


def estimate(
    architecture: WanArchitecture,
    geometry: Geometry,
    text: Mapping[str, Any],
    tiles: Mapping[Decode, Sequence[Tile]],
    *,
    text_tokens: int,
    value_bytes: int,
    contexts: int,
    chunk: int | None,
    encoded_frames: int = 0,
    residual: Residual = "fp32",
    held: bool = False,
    spread: Spread = ALONE,
) -> Activations:
    """The work of every stage of one request of batch 1, a rank's guidance passes one after another.

    Args:
        text: UMT5's sizes.
        tiles: the grids of the decodes that go by tiles.
        value_bytes: 4 in fp32, 2 in bf16.
        contexts: prompts that guidance needs, and passes of a step, 1 or 2.
        chunk: latent frames that the VAE takes at a time; None as many as convolutions can.
        encoded_frames: pixel frames of the clip that the encoder gets, 0 for none.
        held: whether tokens have timesteps of their own, as with a first frame.
    """
    latents = (geometry.latent_frames, geometry.latent_height, geometry.latent_width)
    vae = architecture.vae
    encode: dict[Decode, VaeWork] = {}
    if encoded_frames:
        encoded = ((encoded_frames - 1) // vae.scale_factor_temporal + 1, *latents[1:])
        encode = _encodes(vae, encoded, tiles, chunk, value_bytes, spread)
    return Activations(
        text_encode=text_bytes(text, text_tokens, value_bytes),
        encode_video=encode,
        encode_audio=0,
        denoise=denoise_bytes(
            architecture.transformer,
            geometry,
            text_tokens,
            contexts,
            value_bytes,
            residual=residual,
            held=held,
            spread=spread,
        ),
        decode_video=_decodes(vae, latents, tiles, chunk, value_bytes, spread),
        decode_audio=0,
        kept=rope_bytes(architecture.transformer, geometry),
        prompt=prompt_bytes(architecture.transformer, text_tokens, value_bytes),
        prompts=contexts,
    )


# Chunks are as short as convolutions need, so that no tensor is too large for them.


def _decodes(
    vae: WanVaeConfig,
    latents: tuple[int, int, int],
    tiles: Mapping[Decode, Sequence[Tile]],
    chunk: int | None,
    value_bytes: int,
    spread: Spread,
) -> dict[Decode, VaeWork]:
    """The decodes that can be."""
    work: dict[Decode, VaeWork] = {"whole": VaeWork(decode_bytes(vae, latents, chunk, value_bytes))}
    for decode, grid in tiles.items():
        if spread.plan.vae_size > 1:
            sum_bytes = FP32_BYTES if spread.fp32_sums else value_bytes
            work[decode] = VaeWork(shared_tiles_bytes(vae, latents, grid, chunk, value_bytes, sum_bytes))
        else:
            work[decode] = VaeWork(tiled_decode_bytes(vae, latents, grid, chunk, value_bytes))
    if spread.has_bands:
        work["halo"] = VaeWork(decode_bytes(vae, latents, chunk, value_bytes, spread.band(latents)))
    return work


def _encodes(
    vae: WanVaeConfig,
    latents: tuple[int, int, int],
    tiles: Mapping[Decode, Sequence[Tile]],
    chunk: int | None,
    value_bytes: int,
    spread: Spread,
) -> dict[Decode, VaeWork]:
    """Clips are encoded in tiles where videos are decoded so, whether ranks share them or not."""
    whole = VaeWork(encode_bytes(vae, latents, chunk, value_bytes))
    encodes: dict[Decode, VaeWork] = {"whole": whole}
    for decode, grid in tiles.items():
        encodes[decode] = VaeWork(tiled_encode_bytes(vae, latents, grid, chunk, value_bytes))
    if spread.has_bands:
        encodes["halo"] = whole
        if spread.shares_encode:
            encodes["halo"] = VaeWork(
                encode_bytes(vae, latents, chunk, value_bytes, spread.band(latents), gathers=True)
            )
    return encodes


def text_bytes(text: Mapping[str, Any], tokens: int, value_bytes: int) -> int:
    """One prompt at a time. Worst in attention: scores, their bias and their softmax in fp32."""
    scores = text["num_heads"] * tokens**2 * (2 * value_bytes + 2 * FP32_BYTES)
    return scores + tokens * (3 * text["d_model"] + 3 * text["d_ff"]) * value_bytes


def rope_bytes(config: WanTransformerConfig, geometry: Geometry) -> int:
    """Cosines and sines, the same for all heads."""
    return geometry.video_tokens * config.attention_head_dim * FP32_BYTES


def prompt_bytes(config: WanTransformerConfig, text_tokens: int, value_bytes: int) -> int:
    """Keys and values of one prompt in every block."""
    return text_tokens * 2 * config.num_layers * config.width * value_bytes


def denoise_bytes(
    config: WanTransformerConfig,
    geometry: Geometry,
    text_tokens: int,
    contexts: int,
    value_bytes: int,
    *,
    residual: Residual,
    held: bool,
    spread: Spread = ALONE,
) -> int:
    """Worst in self-attention or in the feed-forward, whichever is larger, with the tokens that a rank has.

    The block's input, the stream, its modulated norm; and in self-attention keys, turned and being turned in
    fp32, queries and values, in the feed-forward the hidden layer before and after GELU. Where tokens have timesteps of
    their own, shift, scale and gate are fp32 rows for each token. Over the ranks of Ulysses attention has what is
    exchanged, beside the stream, its modulated norm, and queries and keys that are not turned yet.
    """
    tokens, width = spread.local_tokens(geometry.video_tokens), config.width
    stream_bytes = FP32_BYTES if residual == "fp32" else value_bytes
    stream = tokens * width * (2 * stream_bytes + value_bytes)
    attention = tokens * width * (2 * FP32_BYTES + 3 * value_bytes)
    feed_forward = 2 * tokens * config.ffn_dim * value_bytes
    modulating = tokens * width * (2 * FP32_BYTES)
    rows = 3 * tokens * width * FP32_BYTES if held else 0
    text = contexts * prompt_bytes(config, text_tokens, value_bytes)
    patches = prod(geometry.patch_size) * geometry.video_tokens
    latents = patches * (config.out_channels * SOLVER_TENSORS + config.in_channels)
    exchanged = spread.exchanged_passes(contexts) * patches * config.out_channels * FP32_BYTES
    worst = stream + max(attention, feed_forward, modulating)
    if spread.plan.ulysses_size > 1:
        turned = SHARED_ATTENTION_TENSORS * value_bytes
        worst = max(worst, tokens * width * (stream_bytes + value_bytes + 2 * stream_bytes + turned))
    if tokens * spread.plan.ulysses_size > geometry.video_tokens:
        # The last rank has its part of the tables as a copy.
        worst += rope_bytes(config, geometry) // spread.plan.ulysses_size
    worst = max(worst + rows, exchanged)
    return worst + text + latents * FP32_BYTES + rope_bytes(config, geometry)


def decode_bytes(
    vae: WanVaeConfig,
    latents: tuple[int, ...],
    chunk: int | None,
    value_bytes: int,
    band: tuple[int, ...] | None = None,
) -> int:
    """Of one chunk of the decoder on ``latents`` (frames, height, width), with what chunks leave each other.

    ``band``: the longest of those that ranks share. The first rank computes it, with all ranks' keys and values in the
    attention, and then has the chunk's frames beside its own part of them and that of one other rank.
    """
    own = band or latents
    most = most_decoder_frames(vae, (1, vae.z_dim, *own))
    frames = max(1, min(most, own[0], chunk or most))
    peak = max(sum(alive) for alive in _decode_moments(vae, (frames, *own[1:])))
    state = _state(decoder_levels(vae), own[1:], vae, decoding=True)
    pixels, own_pixels = (
        3 * frames * vae.scale_factor_temporal * prod(_pixels(vae, (1, *size[1:]))) for size in (latents, own)
    )
    worst = peak + 2 * state
    if band is not None:
        attending = _gathered_attention(
            frames * prod(own[1:]), frames * prod(latents[1:]), decoder_levels(vae)[0].in_channels
        )
        worst = max(worst, attending + 2 * state, pixels + 2 * own_pixels + state)
    # The latents of all frames, raw and normalized in fp32, and the frames of the last chunk in the writer's hands.
    beside = 2 * prod(latents) * vae.z_dim * FP32_BYTES
    return (worst + 2 * pixels) * value_bytes + beside + CONVOLUTION_WORKSPACE


def _gathered_attention(own: int, tokens: int, channels: int) -> int:
    """Elements of input, norm, queries, keys, values, the last two as sent, and all ranks' as they come and joined."""
    return channels * (7 * own + 4 * tokens)


def tiled_decode_bytes(
    vae: WanVaeConfig, latents: tuple[int, ...], tiles: Sequence[Tile], chunk: int | None, value_bytes: int
) -> int:
    """Of ``decode_tiled``: a tile's call beside the sum over tiles, the finished frames, and a tile's frames."""
    clip = 3 * prod(_pixels(vae, latents)) * value_bytes
    return max(decode_bytes(vae, shape, chunk, value_bytes) for shape in _shapes(tiles)) + 3 * clip


def shared_tiles_bytes(
    vae: WanVaeConfig,
    latents: tuple[int, ...],
    tiles: Sequence[Tile],
    chunk: int | None,
    value_bytes: int,
    sum_bytes: int,
) -> int:
    """Of ``decode_tiles_parallel`` on the first rank: one tile's call and frames beside the sum of the clip, whose
    values have ``sum_bytes``; the division of that, in place or into frames of ``value_bytes``, by the weights of some
    frames and, a moment longer, of those before; frames and their bytes of pixels.
    """
    frames, height, width = _pixels(vae, latents)
    clip = 3 * frames * height * width
    call = max(
        decode_bytes(vae, shape, chunk, value_bytes) + 3 * prod(_pixels(vae, shape)) * value_bytes
        for shape in _shapes(tiles)
    )
    weights = 2 * min(frames, DIVIDED_FRAMES) * height * width * FP32_BYTES
    divided = clip * (sum_bytes + (value_bytes if sum_bytes != value_bytes else 0)) + weights
    return max(call + clip * sum_bytes, divided, clip * (value_bytes + 1))


def tiled_encode_bytes(
    vae: WanVaeConfig, latents: tuple[int, ...], tiles: Sequence[Tile], chunk: int | None, value_bytes: int
) -> int:
    """The encode of a tile beside the whole clip and the latents of all tiles, their sums in fp32 and the result."""
    sums = 3 * prod(latents) * vae.z_dim * FP32_BYTES
    return max(encode_bytes(vae, latents, chunk, value_bytes, shape) for shape in _shapes(tiles)) + sums


def _shapes(tiles: Sequence[Tile]) -> set[tuple[int, ...]]:
    """Frames, height and width of latents of the different tiles."""
    return {tuple(span.latent_stop - span.latent_start for span in (t.time, t.height, t.width)) for t in tiles}


def encode_bytes(
    vae: WanVaeConfig,
    latents: tuple[int, ...],
    chunk: int | None,
    value_bytes: int,
    part: tuple[int, ...] | None = None,
    *,
    gathers: bool = False,
) -> int:
    """Of one chunk of the encoder on the clip of ``latents`` (frames, height, width), which is there twice.

    ``part``: the band or tile of it that the encoder gets. ``gathers``: whether the attention has all of a frame's keys
    and values nevertheless, as in a band.
    """
    own = part or latents
    most = most_encoder_frames(vae, (1, vae.z_dim, *own))
    frames = max(1, min(most, latents[0], chunk or most))
    peak = max(sum(alive) for alive in _encode_moments(vae, (frames, *own[1:])))
    if gathers:
        own_tokens, tokens = (frames * prod(size[1:]) for size in (own, latents))
        peak = max(peak, _gathered_attention(own_tokens, tokens, encoder_levels(vae)[-1].channels))
    state = _state(encoder_levels(vae), own[1:], vae, decoding=False)
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
