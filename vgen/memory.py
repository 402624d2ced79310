"""Peak memory of a run predicted from sizes alone, before anything is loaded.

Bytes everywhere. A stage holds the weights that are on the device while it runs, what its modules keep between calls,
and the work of its worst moment; the run's peak is that of its largest stage. What is alive at a worst moment was read
off the modules, whose tensors are named here; the constants are what no module shows. Needs no torch.

The figures are of tensors, as ``torch.cuda.max_memory_allocated`` counts them. What the allocator holds beyond them
and the CUDA context have to fit in the margin.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, Self

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
from vgen.typed import ConfigurationError

if TYPE_CHECKING:
    from torch import nn

GIB = 2**30
FP32_BYTES = 4

Offload = Literal["none", "text_encoder", "stages"]
Decode = Literal["whole", "tile"]
Strategy = Literal["auto", "whole", "tile"]

STAGE_WEIGHTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "text_encode": ("text_encoder", "connectors"),
        "encode_video": ("video_encoder",),
        "encode_audio": ("audio_encoder",),
        "denoise": ("transformer",),
        "decode_video": ("video_decoder",),
        "decode_audio": ("audio_decoder", "vocoder"),
    }
)
"""The components that each stage computes with, which is also what ``Residency.use`` has to bring for it."""

VISITING: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "none": (),
        "text_encoder": STAGE_WEIGHTS["text_encode"],
        "stages": tuple(name for names in STAGE_WEIGHTS.values() for name in names),
    }
)
"""The components that are not on the device while no stage of theirs runs, by ``model.offload``.

``stages`` keeps them in host memory; ``text_encoder`` encodes all prompts before anything else is loaded, and frees it.
"""

MARGIN = 0.05
"""Part of the free memory that a prediction leaves alone: fragments, and what is predicted too low."""

LARGEST_TENSOR = 2**31 - 1
"""Elements above which cuDNN's convolutions fail, whatever the memory."""

# What no module shows; all of it small beside the weights, and measured rather than derived.
CUBLAS_WORKSPACE = 32 * 2**20
"""Held from the first matrix product on (H100 and H200)."""
CONVOLUTION_WORKSPACE = 64 * 2**20
"""Scratch memory of cuDNN's choice of algorithm."""
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


@dataclass(frozen=True)
class Activations:
    """Work of each stage at its worst moment, without weights; 0 where a run has no such stage.

    ``kept``: what outlives the denoising in the transformer, its position tables. ``largest_*_tensor``: elements, in
    the whole decode and in the encode of the longest clip.
    """

    text_encode: int
    encode_video: int
    encode_audio: int
    denoise: int
    decode_video_whole: int
    decode_video_tile: int
    decode_audio: int
    kept: int
    largest_decode_tensor: int
    largest_encode_tensor: int

    def without(self, stages: Collection[str]) -> Self:
        """The same with no work in ``stages``, which a run does not have."""
        of_stage = {
            "decode_video": ("decode_video_whole", "decode_video_tile", "largest_decode_tensor"),
            "encode_video": ("encode_video", "largest_encode_tensor"),
        }
        return replace(self, **{name: 0 for stage in stages for name in of_stage.get(stage, (stage,))})

    def of(self, stage: str, decode: Decode) -> int:
        work: int = getattr(self, f"decode_video_{decode}" if stage == "decode_video" else stage)
        return work + self.kept if work and stage.startswith("decode") else work


@dataclass(frozen=True)
class Prediction:
    """``stages``: bytes on the device at each stage's worst moment; the rest is what they were predicted from."""

    stages: Mapping[str, int]
    weights: Mapping[str, int]
    activations: Activations
    offload: Offload
    decode: Decode

    @property
    def peak_stage(self) -> str:
        return max(self.stages, key=lambda stage: self.stages[stage])

    @property
    def peak(self) -> int:
        return self.stages[self.peak_stage]


def predict(
    weights: Mapping[str, int], activations: Activations, offload: Offload = "none", decode: Decode = "whole"
) -> Prediction:
    """``weights``: bytes by component, named as in ``STAGE_WEIGHTS``; without those that the run does not build."""
    visiting = VISITING[offload]
    resident = sum(size for name, size in weights.items() if name not in visiting)
    stages = {}
    for stage, names in STAGE_WEIGHTS.items():
        work = activations.of(stage, decode)
        if work:
            brought = sum(weights.get(name, 0) for name in names if name in visiting)
            loaded = 0 if offload == "text_encoder" and stage == "text_encode" else resident
            stages[stage] = loaded + brought + work + CUBLAS_WORKSPACE
    return Prediction(stages, weights, activations, offload, decode)


def describe(prediction: Prediction, free_bytes: int) -> str:
    """One line for the console."""
    return (
        f"memory: predicted peak {_gib(prediction.peak)} in {prediction.peak_stage} of {_gib(free_bytes)} free "
        f"(model.offload={prediction.offload}, {'tiled' if prediction.decode == 'tile' else 'whole'} decode)"
    )


def fits(needed: int, free_bytes: int, margin: float = MARGIN) -> bool:
    return needed <= free_bytes * (1 - margin)


def fit(prediction: Prediction, free_bytes: int, margin: float = MARGIN) -> None:
    """Refuse a run that cannot fit into ``free_bytes`` of device memory, measured before anything is loaded.

    Raises:
        ConfigurationError: what does not fit, by how much, and the first setting that would make it fit.
    """
    if fits(prediction.peak, free_bytes, margin):
        return
    room = int(free_bytes * (1 - margin))
    levers = list(_levers(prediction))
    remedy = next((f"use {name} ({_gib(lever.peak)})" for name, lever in levers if lever.peak <= room), None)
    if remedy is None:
        best, least = min(levers, key=lambda lever: lever[1].peak, default=("", prediction))
        even = f"even {best} needs {_gib(least.peak)}: " if best else ""
        weights = least.peak - least.activations.of(least.peak_stage, least.decode)
        smaller = "ask for fewer num_frames or a smaller height and width"
        remedy = even + (smaller if weights < room else f"its weights alone are {_gib(weights)}, use a larger GPU")
    raise ConfigurationError(
        f"the run needs {_gib(prediction.peak)} of GPU memory in {prediction.peak_stage} and {_gib(room)} can be used "
        f"({_gib(free_bytes)} free), {_gib(prediction.peak - room)} too little; {remedy}"
    )


def _levers(prediction: Prediction) -> Iterator[tuple[str, Prediction]]:
    """Settings that need less, each with its prediction: what changes no result first."""
    weights, activations, offload, decode = (
        prediction.weights,
        prediction.activations,
        prediction.offload,
        prediction.decode,
    )
    steps: tuple[Offload, ...] = ("none", "text_encoder", "stages")
    further = steps[steps.index(offload) + 1 :]
    for step in further:
        yield f"model.offload={step}", predict(weights, activations, step, decode)
    if decode == "whole":
        yield "parallel.vae_strategy=tile", predict(weights, activations, offload, "tile")
        for step in further:
            yield f"model.offload={step} parallel.vae_strategy=tile", predict(weights, activations, step, "tile")


def choose_decode(
    strategy: Strategy,
    weights: Mapping[str, int],
    activations: Activations,
    offload: Offload,
    free_bytes: int,
    margin: float = MARGIN,
) -> tuple[Prediction, str | None]:
    """``auto`` decodes whole where that fits and in tiles where it does not, with the sentence that says so.

    Raises:
        ConfigurationError: a tensor of the encode, or of the whole decode that was asked for, is larger than
            convolutions can be.
    """
    encoded = activations.largest_encode_tensor
    if encoded > LARGEST_TENSOR:
        raise ConfigurationError(
            f"request.video cannot be encoded at this size: one tensor has {encoded} elements and convolutions take at "
            f"most {LARGEST_TENSOR}; ask for fewer num_frames or a smaller height and width"
        )
    whole, tile = (predict(weights, activations, offload, decode) for decode in ("whole", "tile"))
    if strategy == "tile":
        return tile, None
    elements = activations.largest_decode_tensor
    if elements > LARGEST_TENSOR:
        reason = f"decoded whole, one tensor has {elements} elements and convolutions take at most {LARGEST_TENSOR}"
        if strategy == "whole":
            raise ConfigurationError(f"parallel.vae_strategy=whole cannot decode this size: {reason}; use tile or auto")
        return tile, f"{reason}: decoding in tiles, an approximation"
    needed = whole.stages.get("decode_video", 0)
    if strategy == "whole" or fits(needed, free_bytes, margin):
        return whole, None
    return tile, (
        f"decoded whole, the video needs {_gib(needed)} of {_gib(free_bytes)} free GPU memory: decoding in tiles "
        f"({_gib(tile.stages['decode_video'])}), an approximation; parallel.vae_strategy=whole insists"
    )


def weight_bytes(module: "nn.Module", value_bytes: int) -> int:
    """Bytes of ``module``'s parameters and buffers once loaded with floating-point values of ``value_bytes``.

    The module may be on the meta device in any dtype; tensors that it ties together count once.
    """
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}.values()
    return sum(
        tensor.numel() * (value_bytes if tensor.is_floating_point() else tensor.element_size()) for tensor in tensors
    )


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


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
