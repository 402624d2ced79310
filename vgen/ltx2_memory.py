"""The work of LTX-2's stages at their worst moments, in bytes: what ``vgen.memory`` adds weights to. Needs no torch.

What is alive at a worst moment was read off the modules, whose tensors are named here; the constants are what no module
shows.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

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
    tiles: Mapping[Decode, Sequence[Tile]],
    *,
    value_bytes: int,
    contexts: int,
    passes: int = 1,
    encoded_frames: int = 0,
    encodes_sound: bool = False,
    conditioned: bool = False,
    spread: Spread = ALONE,
) -> Activations:
    """The work of every stage of one request of batch 1, a rank's guidance passes one after another.

    Args:
        tiles: the grids of the decodes that go by tiles.
        value_bytes: 4 in fp32, 2 in bf16.
        contexts: prompts that guidance needs, 1 or 2.
        passes: of a step.
        encoded_frames: pixel frames of the longest clip that the video encoder gets, 1 for images, 0 for none.
        encodes_sound: whether the audio encoder runs.
        conditioned: whether tokens have timesteps of their own, as with images.
    """
    latents = (geometry.latent_frames, geometry.latent_height, geometry.latent_width)
    transformer, decoder = config.transformer, config.video_decoder
    audio = audio_bytes(config, geometry, value_bytes) if geometry.audio_tokens else 0
    encode_video: dict[Decode, VaeWork] = {}
    if encoded_frames:
        encode_video = _encodes(config.video_encoder, (encoded_frames, *latents[1:]), tiles, value_bytes, spread)
    tables = rope_bytes(transformer, geometry, value_bytes)
    return Activations(
        text_encode=text_bytes(text, value_bytes),
        encode_video=encode_video,
        encode_audio=audio if encodes_sound else 0,
        denoise=denoise_bytes(
            transformer, geometry, text.tokens, contexts, value_bytes, conditioned, passes=passes, spread=spread
        )
        + tables,
        decode_video=_decodes(decoder, latents, tiles, value_bytes, spread),
        decode_audio=audio,
        kept=tables,
        prompt=prompt_bytes(transformer, text.tokens, value_bytes),
        prompts=contexts,
    )


def _decodes(
    config: VideoDecoderConfig,
    latents: tuple[int, int, int],
    tiles: Mapping[Decode, Sequence[Tile]],
    value_bytes: int,
    spread: Spread,
) -> dict[Decode, VaeWork]:
    """The decodes that can be."""
    work: dict[Decode, VaeWork] = {
        "whole": VaeWork(decode_bytes(config, latents, value_bytes), largest_decode_tensor(config, latents))
    }
    for decode, grid in tiles.items():
        if spread.plan.vae_size > 1:
            size = shared_tiles_bytes(
                config, latents, grid, value_bytes, FP32_BYTES if spread.fp32_sums else value_bytes
            )
        else:
            size = tiled_decode_bytes(config, latents, grid, value_bytes)
        work[decode] = VaeWork(size, max(largest_decode_tensor(config, shape) for shape in _shapes(grid)))
    if spread.has_bands:
        band = spread.band(latents)
        work["halo"] = VaeWork(
            halo_decode_bytes(config, latents, band, value_bytes), largest_decode_tensor(config, band)
        )
    return work


def _encodes(
    config: VideoEncoderConfig,
    size: tuple[int, int, int],
    tiles: Mapping[Decode, Sequence[Tile]],
    value_bytes: int,
    spread: Spread,
) -> dict[Decode, VaeWork]:
    """``size``: pixel frames, height and width in latents. Clips are never encoded in tiles."""

    def work(part: tuple[int, int, int]) -> VaeWork:
        pixels, own = (
            (frames, *(n * unit for n, unit in zip(space, VIDEO_COMPRESSION[1:], strict=True)))
            for frames, *space in (size, part)
        )
        largest = max(max(alive) for alive in _encode_moments(config, own))
        return VaeWork(encode_bytes(config, pixels, value_bytes, own), largest)

    whole = work(size)
    encodes: dict[Decode, VaeWork] = {"whole": whole, **dict.fromkeys(tiles, whole)}
    if spread.has_bands:
        encodes["halo"] = work(spread.band(size)) if spread.shares_encode else whole
    return encodes


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


def prompt_bytes(config: TransformerConfig, text_tokens: int, value_bytes: int) -> int:
    """One prompt as the blocks read it; with 2.0 the keys and values of every block are there too."""
    tensors = 1 + 2 * config.num_layers if config.caption_projection else 1
    return text_tokens * tensors * (config.width + config.audio_width) * value_bytes


def denoise_bytes(
    config: TransformerConfig,
    geometry: Geometry,
    text_tokens: int,
    contexts: int,
    value_bytes: int,
    conditioned: bool = False,
    *,
    passes: int = 1,
    spread: Spread = ALONE,
) -> int:
    """Worst in the video's feed-forward: block input, stream, modulated norm, four widths before GELU, four after.

    Attention holds less: input, stream, modulated norm, queries, keys, values, turned keys, output. Over the ranks of
    Ulysses, where a rank has its tokens only, as much: to input, norm, queries, keys and values come these three as
    they are sent and as they are received, the tokens of all ranks for its heads; or the latter and the output as
    attention made it, as it came back, and with its heads side by side. Where the tokens do not divide, the last rank
    has its part of the tables as a copy.

    Where tokens have timesteps of their own, shift, scale and gate are of the stream's size. Sound and text are whole
    on every rank.
    """
    widths = config.width + config.audio_width
    rows, local = 3 if conditioned else 0, spread.local_tokens(geometry.video_tokens)
    stream = (3 + 4 + 4 + rows) * local * config.width
    stream += 3 * geometry.audio_tokens * config.audio_width
    if local * spread.plan.ulysses_size > geometry.video_tokens:
        stream += local * widths
    latents = geometry.video_tokens * config.in_channels + geometry.audio_tokens * config.audio_in_channels
    worst = max(stream * value_bytes, spread.exchanged_passes(passes) * latents * FP32_BYTES)
    return worst + contexts * prompt_bytes(config, text_tokens, value_bytes) + GUIDANCE_TENSORS * latents * FP32_BYTES


def decode_bytes(config: VideoDecoderConfig, latents: tuple[int, ...], value_bytes: int) -> int:
    """Of one call of the decoder on ``latents`` (frames, height, width)."""
    peak = max(sum(alive) for alive in _decode_moments(config, latents))
    return peak * value_bytes + CONVOLUTION_WORKSPACE


def halo_decode_bytes(
    config: VideoDecoderConfig, latents: tuple[int, int, int], band: tuple[int, int, int], value_bytes: int
) -> int:
    """Of the first of the ranks that share a decode in bands, of which ``band`` is the longest.

    Worst in the decoder, on its band, or afterwards: all frames beside its own and those of one other rank, or beside
    their bytes of pixels. Lines that neighbours send come where the convolution's output is not yet, which is larger.
    """
    whole, own = (config.out_channels * prod(_pixels(size)) for size in (latents, band))
    return max(decode_bytes(config, band, value_bytes), (whole + 2 * own) * value_bytes, whole * (value_bytes + 1))


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


def encode_bytes(
    config: VideoEncoderConfig, pixels: tuple[int, ...], value_bytes: int, own: tuple[int, ...] | None = None
) -> int:
    """Of one call of the encoder on a clip of ``pixels`` (frames, height, width), which stays beside it in fp32.

    ``own``: the longest band of the clip, where ranks share it; the gathered latents are few.
    """
    clip = prod(pixels) * config.in_channels
    peak = max(sum(alive) for alive in _encode_moments(config, own or pixels))
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
    call = max(decode_bytes(config, shape, value_bytes) for shape in _shapes(tiles))
    frame = config.out_channels * prod(_pixels((1, *latents[1:])))
    times = list(dict.fromkeys(tile.time for tile in tiles))
    worst = written = carried = 0
    for span, following in zip(times, [*times[1:], None], strict=True):
        frames = span.stop - span.start
        ready = frames if following is None else following.start - span.start
        worst = max(worst, (frames + carried + written) * frame * value_bytes + written * frame)
        written, carried = ready, frames - ready
    return call + worst


def shared_tiles_bytes(
    config: VideoDecoderConfig,
    latents: tuple[int, ...],
    tiles: Sequence[Tile],
    value_bytes: int,
    sum_bytes: int,
) -> int:
    """Of ``decode_tiles_parallel`` on the first rank: one tile's call beside the sum of the clip, whose values have
    ``sum_bytes``; the division of that, in place or into frames of ``value_bytes``, by the weights of some frames and,
    a moment longer, of those before; frames and their bytes of pixels.
    """
    frames, height, width = _pixels(latents)
    clip = config.out_channels * frames * height * width
    call = max(decode_bytes(config, shape, value_bytes) for shape in _shapes(tiles))
    weights = 2 * min(frames, DIVIDED_FRAMES) * height * width * FP32_BYTES
    divided = clip * (sum_bytes + (value_bytes if sum_bytes != value_bytes else 0)) + weights
    return max(call + clip * sum_bytes, divided, clip * (value_bytes + 1))


def _shapes(tiles: Sequence[Tile]) -> set[tuple[int, ...]]:
    """Frames, height and width of latents of the different tiles."""
    return {tuple(span.latent_stop - span.latent_start for span in (t.time, t.height, t.width)) for t in tiles}


def _pixels(latents: tuple[int, ...]) -> tuple[int, int, int]:
    frames, height, width = latents
    time, *space = VIDEO_COMPRESSION
    return (frames - 1) * time + 1, height * space[0], width * space[1]


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
