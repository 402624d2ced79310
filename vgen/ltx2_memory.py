"""The work of LTX-2's stages at their worst moments, in bytes: what ``vgen.memory`` adds weights to. Needs no torch.

What is alive at a worst moment was read off the modules, whose tensors are named here; the constants are what no module
shows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from vgen.memory import CONVOLUTION_WORKSPACE, FP32_BYTES, Activations
from vgen.models.ltx2.config import (
    AUDIO_COMPRESSION,
    VIDEO_COMPRESSION,
    LTX2Config,
    TransformerConfig,
    VideoDecoderConfig,
    VideoEncoderConfig,
    VocoderConfig,
)
from vgen.models.ltx2.geometry import Geometry
from vgen.parallel.tiles import Tile

GUIDANCE_TENSORS = 10
"""fp32 copies of the latents between solver, guidance and passes."""
VOCODER_TENSORS = {"1": 7, "AMP1": 12}
"""Tensors of a level's size: its input, the parallel blocks' outputs, their stack, and what a block has in hand."""
AUDIO_VAE_TENSORS = 8
"""Tensors of the finest level's size in the audio VAE."""


@dataclass(frozen=True)
class TextSizes:
    """Of the text encoder. ``tokens`` per prompt, padding included; ``num_states``: hidden states, its layers + 1."""

    tokens: int
    hidden_size: int
    intermediate_size: int
    num_states: int


def estimate(
    config: LTX2Config,
    geometry: Geometry,
    text: TextSizes,
    tiles: Sequence[Tile],
    *,
    value_bytes: int,
    contexts: int,
    encoded_frames: int = 0,
    encodes_sound: bool = False,
    conditioned: bool = False,
) -> Activations:
    """The work of every stage of one request of batch 1, its guidance passes one after another.

    Args:
        tiles: the plan of a tiled decode.
        value_bytes: 4 in fp32, 2 in bf16.
        contexts: prompts that guidance needs, 1 or 2.
        encoded_frames: pixel frames of the longest clip that the video encoder gets, 1 for images, 0 for none.
        encodes_sound: whether the audio encoder runs.
        conditioned: whether tokens have timesteps of their own, as with images.
    """
    latents = (geometry.latent_frames, geometry.latent_height, geometry.latent_width)
    transformer, decoder = config.transformer, config.video_decoder
    audio = audio_bytes(config, geometry, value_bytes) if geometry.audio_tokens else 0
    encode_video = largest_encode = 0
    if encoded_frames:
        space = tuple(size * unit for size, unit in zip(latents[1:], VIDEO_COMPRESSION[1:], strict=True))
        pixels = (encoded_frames, *space)
        encode_video = encode_bytes(config.video_encoder, pixels, value_bytes)
        largest_encode = max(max(alive) for alive in _encode_moments(config.video_encoder, pixels))
    tables = rope_bytes(transformer, geometry, value_bytes)
    return Activations(
        text_encode=text_bytes(text, value_bytes),
        encode_video=encode_video,
        encode_audio=audio if encodes_sound else 0,
        denoise=denoise_bytes(transformer, geometry, text.tokens, contexts, value_bytes, conditioned) + tables,
        decode_video_whole=decode_bytes(decoder, latents, value_bytes),
        decode_video_tile=tiled_decode_bytes(decoder, latents, tiles, value_bytes),
        decode_audio=audio,
        kept=tables,
        largest_decode_tensor=largest_decode_tensor(decoder, latents),
        largest_encode_tensor=largest_encode,
    )


def text_bytes(text: TextSizes, value_bytes: int) -> int:
    """One prompt at a time: Gemma keeps every hidden state, then the connectors normalise them stacked.

    Worst there: the states, their stack, its fp32 normalisation and that rounded back.
    """
    states = text.num_states * text.tokens * text.hidden_size
    rounded = value_bytes if value_bytes != FP32_BYTES else 0
    connectors = states * (2 * value_bytes + FP32_BYTES + rounded)
    # In Gemma's last layer: the residual stream twice, gate, up and their product.
    gemma = states * value_bytes + text.tokens * (2 * text.hidden_size + 3 * text.intermediate_size) * value_bytes
    return max(connectors, gemma)


def rope_bytes(config: TransformerConfig, geometry: Geometry, value_bytes: int) -> int:
    """Cosines and sines of both streams, for their own attention and for the one between them."""
    video = geometry.video_tokens * (config.width + config.audio_width)
    return (video + 2 * geometry.audio_tokens * config.audio_width) * value_bytes


def denoise_bytes(
    config: TransformerConfig,
    geometry: Geometry,
    text_tokens: int,
    contexts: int,
    value_bytes: int,
    conditioned: bool = False,
) -> int:
    """Worst in the video's feed-forward: block input, stream, modulated norm, four widths before GELU, four after.

    Attention holds less: input, stream, modulated norm, queries, keys, values, turned keys, output. Where tokens have
    timesteps of their own, shift, scale and gate are of the stream's size. With 2.0 the text's keys and values of every
    block are there too, once per prompt.
    """
    widths = config.width + config.audio_width
    rows = 3 if conditioned else 0
    stream = (3 + 4 + 4 + rows) * geometry.video_tokens * config.width
    stream += 3 * geometry.audio_tokens * config.audio_width
    text = contexts * text_tokens * widths
    if config.caption_projection:
        text += contexts * text_tokens * 2 * config.num_layers * widths
    latents = geometry.video_tokens * config.in_channels + geometry.audio_tokens * config.audio_in_channels
    return (stream + text) * value_bytes + GUIDANCE_TENSORS * latents * FP32_BYTES


def decode_bytes(config: VideoDecoderConfig, latents: tuple[int, ...], value_bytes: int) -> int:
    """Of one call of the decoder on ``latents`` (frames, height, width)."""
    peak = max(sum(alive) for alive in _decode_moments(config, latents))
    return peak * value_bytes + CONVOLUTION_WORKSPACE


def largest_decode_tensor(config: VideoDecoderConfig, latents: tuple[int, ...]) -> int:
    """Elements of the largest tensor of one call on ``latents`` (frames, height, width)."""
    return max(max(alive) for alive in _decode_moments(config, latents))


def _decode_moments(config: VideoDecoderConfig, latents: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Elements of the tensors that are alive together, at each moment that can be the worst."""
    size = tuple(latents)
    channels = config.base_channels * prod(block.multiplier for block in config.blocks)
    bordered = _bordered(size) * config.latent_channels
    yield prod(size) * config.latent_channels, bordered, prod(size) * channels
    for block in config.blocks:
        x = prod(size) * channels
        bordered = _bordered(size) * channels
        if block.kind == "res_x":
            yield x, bordered, x  # the block's input, the bordered norm, the first convolution's result
            continue
        cells = _cells(block.kind)
        channels //= block.multiplier
        hidden = prod(size) * channels * prod(cells)
        size = tuple(n * cell for n, cell in zip(size, cells, strict=True))
        size = (size[0] - (cells[0] - 1), *size[1:])  # the first frame stays one
        yield x, bordered, hidden
        yield x, hidden, prod(size) * channels
    patches = prod(size) * config.out_channels * config.patch_size**2
    yield prod(size) * channels, _bordered(size) * channels, patches
    yield prod(size) * channels, patches, patches


def encode_bytes(config: VideoEncoderConfig, pixels: tuple[int, ...], value_bytes: int) -> int:
    """Of one call of the encoder on a clip of ``pixels`` (frames, height, width), which stays beside it in fp32."""
    clip = prod(pixels) * config.in_channels
    peak = max(sum(alive) for alive in _encode_moments(config, pixels))
    return clip * FP32_BYTES + peak * value_bytes + CONVOLUTION_WORKSPACE


def _encode_moments(config: VideoEncoderConfig, pixels: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    patch = config.patch_size
    size: tuple[int, ...] = (pixels[0], pixels[1] // patch, pixels[2] // patch)
    channels = config.latent_channels
    patches = config.in_channels * patch**2
    yield _bordered(size) * patches, prod(size) * channels
    for block in config.blocks:
        x = prod(size) * channels
        bordered = _bordered(size) * channels
        if block.kind == "res_x":
            yield x, bordered, x
            continue
        cells = _cells(block.kind)
        channels *= block.multiplier
        # One frame more in front makes the number of frames even; the convolution makes 1 / cells of the channels.
        padded = (size[0] + cells[0] - 1, *size[1:])
        hidden = prod(padded) * channels // prod(cells)
        size = tuple(n // cell for n, cell in zip(padded, cells, strict=True))
        yield x, bordered, hidden
        yield x, hidden, prod(size) * channels
    yield prod(size) * channels, _bordered(size) * channels


def _cells(kind: str) -> tuple[int, int, int]:
    """Factors along time, height and width of a block such as ``compress_all`` or ``compress_space_res``."""
    axes = kind.removeprefix("compress_").removesuffix("_res")
    return {"all": (2, 2, 2), "time": (2, 1, 1), "space": (1, 2, 2)}[axes]


def _bordered(size: tuple[int, ...]) -> int:
    return prod(n + 2 for n in size)


def tiled_decode_bytes(
    config: VideoDecoderConfig, latents: tuple[int, ...], tiles: Sequence[Tile], value_bytes: int
) -> int:
    """Of ``decode_tiled``: a tile's call beside the group being summed, the frames it shares with the next one, and the
    group before it, which the writer still holds with its bytes of pixels.
    """
    shapes = {tuple(span.latent_stop - span.latent_start for span in (t.time, t.height, t.width)) for t in tiles}
    call = max(decode_bytes(config, shape, value_bytes) for shape in shapes)
    frame = config.out_channels * prod(n * unit for n, unit in zip(latents[1:], VIDEO_COMPRESSION[1:], strict=True))
    times = list(dict.fromkeys(tile.time for tile in tiles))
    worst = written = carried = 0
    for span, following in zip(times, [*times[1:], None], strict=True):
        frames = span.stop - span.start
        ready = frames if following is None else following.start - span.start
        worst = max(worst, (frames + carried + written) * frame * value_bytes + written * frame)
        written, carried = ready, frames - ready
    return call + worst


def audio_bytes(config: LTX2Config, geometry: Geometry, value_bytes: int) -> int:
    """Audio VAE and vocoder, either way. With bandwidth extension the vocoder computes in fp32, with copies of the
    weights of one of its generators.
    """
    mel_frames = geometry.audio_tokens * AUDIO_COMPRESSION
    decoder, vocoder, extension = config.audio_decoder, config.vocoder, config.bandwidth_extension
    vae = AUDIO_VAE_TENSORS * mel_frames * decoder.mel_bins * decoder.base_channels
    if extension is None:
        return max(vae, _vocoder_values(vocoder, mel_frames)) * value_bytes + CONVOLUTION_WORKSPACE
    hops = mel_frames * prod(vocoder.upsample_rates) // extension.hop_length
    generators = ((vocoder, mel_frames), (extension.generator, hops))
    widened = max(_vocoder_values(part, frames) + _vocoder_weights(part) for part, frames in generators)
    return max(vae * value_bytes, widened * FP32_BYTES) + CONVOLUTION_WORKSPACE


def _vocoder_values(config: VocoderConfig, mel_frames: int) -> int:
    samples, channels, largest = mel_frames, config.initial_channels, 0
    for rate in config.upsample_rates:
        samples, channels = samples * rate, channels // 2
        largest = max(largest, samples * channels)
    return largest * VOCODER_TENSORS[config.resblock]


def _vocoder_weights(config: VocoderConfig) -> int:
    """Weights of the convolutions; biases and activations are few."""
    channels, weights = config.initial_channels, 7 * config.in_channels * config.initial_channels
    kernels = zip(config.resblock_kernel_sizes, config.resblock_dilations, strict=True)
    per_square = sum(2 * len(dilations) * size for size, dilations in kernels)
    for kernel in config.upsample_kernel_sizes:
        weights += channels * (channels // 2) * kernel
        channels //= 2
        weights += per_square * channels**2
    return weights + 7 * channels * config.out_channels
