"""What a parallel plan costs, predicted from sizes: seconds of a denoising step and of a decode, and bytes sent.

Work is counted from the architecture, kernel by kernel, and takes as long as rates allow that were measured on one and
two GPUs; nothing is overlapped. Torch-free. Two constants are fitted and not measured by themselves, the shares of the
copy bandwidth that elementwise kernels reach; they are the same for all models. Everything here is a prediction, and
``calibrate`` corrects it by what earlier runs took. All in one file, so that a figure can be followed from the sizes of
a model to the measurement behind it.

Seconds, bytes and FLOPs everywhere; values of 2 bytes (bf16). "Rows" are tokens of one rank.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any, Literal

from vgen.models.ltx2.config import TransformerConfig, VideoDecoderConfig
from vgen.models.wan.config import WanTransformerConfig, WanVaeConfig
from vgen.models.wan.vae_levels import Level, decoder_levels
from vgen.parallel.balance import assign_tiles, plan_grid
from vgen.parallel.plans import ParallelPlan
from vgen.parallel.tiles import Tile, TileSettings

Curve = tuple[tuple[float, float], ...]
"""Measured points (size, value), the smallest size first."""

Sizes = tuple[int, int, int]
"""Frames, height and width."""

Decode = Literal["whole", "tile", "tile_balanced", "halo"]

VALUE_BYTES = 2


# ---------------------------------------------------------------- what machines do


@dataclass(frozen=True)
class Op:
    """Kernels of one kind. ``moved``: bytes read and written; ``kernels``: how many are launched.

    ``size`` is what the rate depends on: FLOPs of one matrix product or attention, channels of a convolution.
    """

    kind: Literal["gemm", "attention", "convolution", "elementwise", "vae_elementwise"]
    moved: float
    kernels: int = 1
    flops: float = 0.0
    size: tuple[float, ...] = ()


@dataclass(frozen=True)
class Message:
    """Collectives of one kind. ``sent``: bytes that leave the busiest rank in one of them, of an all-gather those that
    reach it, of a reduction the bytes that are reduced."""

    kind: Literal["all_to_all", "all_gather", "reduce", "send_recv"]
    sent: float
    times: int = 1


@dataclass(frozen=True)
class Part:
    """What a rank does ``times`` times."""

    ops: tuple[Op, ...] = ()
    messages: tuple[Message, ...] = ()
    times: int = 1


@dataclass(frozen=True)
class Machine:
    """Measured ceilings of a GPU among others of its host.

    ``gemm`` and ``attention``: FLOP/s by the FLOPs of one call; ``convolution``: FLOP/s by channels, multiples of
    ``channel_multiple``; others waste the power ``channel_waste`` of what they fill it up by. ``bandwidth``: bytes/s
    read and written by a copy, ``elementwise`` and ``vae_elementwise``: the shares of it that such kernels reach in a
    transformer, and in a VAE with its borders and strided writes. ``kernel_s``: the shortest kernel; ``dispatch_s`` and
    ``vae_dispatch_s``: what the host needs to launch one, the views before it included. ``all_to_all``, ``reduce`` and
    ``send_recv``: seconds by ``Message.sent``.
    """

    name: str
    memory_bytes: int
    gemm: Curve
    attention: Curve
    convolution: Curve
    channel_multiple: int
    channel_waste: float
    bandwidth: float
    elementwise: float
    vae_elementwise: float
    kernel_s: float
    dispatch_s: float
    vae_dispatch_s: float
    all_to_all: Curve
    reduce: Curve
    send_recv: Curve

    def seconds(self, parts: Iterable[Part], dispatch_s: float = 0.0) -> float:
        """Of ``parts`` one after another, at least ``dispatch_s`` for each kernel; 0 where a graph is replayed."""
        parts = tuple(parts)
        busy = sum(part.times * self._part_seconds(part) for part in parts)
        launches = sum(part.times * (sum(op.kernels for op in part.ops) + _collectives(part)) for part in parts)
        return max(busy, launches * dispatch_s)

    def _part_seconds(self, part: Part) -> float:
        sending = (message.times * self._message_seconds(message) for message in part.messages)
        return sum(map(self._op_seconds, part.ops)) + sum(sending)

    def _op_seconds(self, op: Op) -> float:
        shares = {"elementwise": self.elementwise, "vae_elementwise": self.vae_elementwise}
        moving = op.moved / (self.bandwidth * shares.get(op.kind, self.elementwise))
        computing = op.flops / self._rate(op) if op.flops else 0.0
        return max(computing, moving, op.kernels * self.kernel_s)

    def _rate(self, op: Op) -> float:
        if op.kind != "convolution":
            return _by_logarithm(self.gemm if op.kind == "gemm" else self.attention, op.size[0])
        filled = [-(-channels // self.channel_multiple) * self.channel_multiple for channels in op.size]
        share = prod(op.size) / prod(filled)
        return _by_logarithm(self.convolution, min(filled)) * share**self.channel_waste

    def _message_seconds(self, message: Message) -> float:
        curves = {"reduce": self.reduce, "send_recv": self.send_recv}
        return _by_line(curves.get(message.kind, self.all_to_all), message.sent)


def _collectives(part: Part) -> int:
    return sum(message.times for message in part.messages)


def _by_logarithm(curve: Curve, size: float) -> float:
    """Between the points in the logarithm of the size; beyond the ends as there."""
    return _between([(math.log(at), value) for at, value in curve], min(max(size, curve[0][0]), curve[-1][0]), math.log)


def _by_line(curve: Curve, size: float) -> float:
    """Between the points and beyond the ends in straight lines."""
    return _between(curve, size, float)


def _between(curve: Sequence[tuple[float, float]], size: float, scale: Callable[[float], float]) -> float:
    at = scale(size)
    (left, low), (right, high) = next((pair for pair in pairwise(curve) if at <= pair[1][0]), tuple(curve[-2:]))
    return low + (high - low) * (at - left) / (right - left)


MIB = 2**20

H200 = Machine(
    name="H200",
    memory_bytes=139 * 2**30,
    gemm=((6.4e10, 499e12), (2.6e11, 530e12), (5.2e11, 655e12), (2.2e12, 735e12)),
    attention=((4.8e11, 539e12), (3.9e12, 696e12), (9.1e12, 599e12), (2.2e13, 570e12)),
    convolution=((128, 647e12), (256, 720e12), (512, 704e12), (1024, 735e12)),
    channel_multiple=128,
    channel_waste=0.8,  # 160 -> 160 channels at 357 TFLOP/s, 128 -> 48 at 297
    bandwidth=4.2e12,
    elementwise=0.6,  # fitted, see the module
    vae_elementwise=0.34,  # likewise
    kernel_s=4e-6,
    # 230 ms of a step of diffusers' LTX-2, by the launches counted here.
    dispatch_s=0.230 / 48 / 120,
    vae_dispatch_s=1e-5,  # assumed
    # Two ranks send half of a buffer: the buffers were of 16 and 256 MiB.
    all_to_all=((8 * MIB, 0.055e-3), (128 * MIB, 0.476e-3)),
    reduce=((MIB, 0.042e-3), (256 * MIB, 0.886e-3), (1024 * MIB, 3.25e-3)),
    send_recv=((MIB, 0.075e-3), (16 * MIB, 0.088e-3), (64 * MIB, 0.273e-3), (1024 * MIB, 3.21e-3)),
)
"""One of the GPUs of a host whose GPUs all reach each other by NVLink: torch 2.11, 30 November 2026."""

MEASURED_RANKS = 2
"""Ranks of the groups whose collectives were measured. Larger groups are taken to send as fast, which NVSwitch allows
and nobody here has seen."""


# ---------------------------------------------------------------- counting work


def _gemm(rows: float, inner: float, columns: float, times: int = 1) -> Op:
    moved = VALUE_BYTES * (rows * inner + inner * columns + rows * columns)
    flops = 2 * rows * inner * columns
    return Op("gemm", times * moved, times, times * flops, (flops,))


def _attention(heads: float, queries: float, keys: float, head_dim: int) -> Op:
    flops = 4 * heads * queries * keys * head_dim
    return Op("attention", VALUE_BYTES * heads * head_dim * 2 * (queries + keys), 1, flops, (flops,))


def _elementwise(rows: float, width: float, bytes_per_value: float, kernels: int) -> Op:
    """``bytes_per_value``: read and written by all ``kernels`` together."""
    return Op("elementwise", rows * width * bytes_per_value, kernels)


@dataclass(frozen=True)
class Tokens:
    """Of one pass; ``image``: what Wan 2.1's image-to-video attends to besides the text."""

    video: int
    text: int
    audio: int = 0
    image: int = 0


def _part_of_others(ranks: int) -> float:
    return (ranks - 1) / ranks


def _exchange(rows: float, width: float, ulysses_size: int) -> tuple[tuple[Op, ...], tuple[Message, ...]]:
    """Of the video's self-attention: queries, keys and values go in one message, the result in another."""
    if ulysses_size == 1:
        return (), ()
    values = VALUE_BYTES * rows * width
    sent = values * _part_of_others(ulysses_size)
    # Packed before each message, and laid out again after the second.
    packing = _elementwise(rows, width, 2 * VALUE_BYTES * (3 + 1 + 1), 3)
    return (packing,), (Message("all_to_all", 3 * sent), Message("all_to_all", sent))


def ltx2_pass(config: TransformerConfig, tokens: Tokens, ulysses_size: int = 1) -> tuple[Part, ...]:
    """One guidance pass of the LTX-2 transformer on a rank that has 1 / ``ulysses_size`` of the video's tokens.

    The audio's tokens are whole on every rank. Keys and values of a text that no noise level changes (2.0) are not
    computed in a pass.
    """
    rows, width, audio = -(-tokens.video // ulysses_size), config.width, config.audio_width
    packing, messages = _exchange(rows, width, ulysses_size)
    heads = config.num_attention_heads
    block = [
        *_ltx2_stream(config, rows, width, config.attention_head_dim, tokens.text),
        _attention(heads / ulysses_size, tokens.video, tokens.video, config.attention_head_dim),
        *packing,
    ]
    if tokens.audio:
        block += _ltx2_stream(config, tokens.audio, audio, config.audio_attention_head_dim, tokens.text)
        block.append(_attention(heads, tokens.audio, tokens.audio, config.audio_attention_head_dim))
        block += _ltx2_between(config, rows, tokens, ulysses_size)
        messages += _ltx2_audio_messages(config, rows, tokens.audio, ulysses_size)
    ends = (_gemm(rows, config.in_channels, width), _gemm(rows, width, config.out_channels))
    return (
        Part(tuple(block), messages, config.num_layers),
        Part(ends, _gathered(tokens.video * config.out_channels, ulysses_size)),
    )


def _gathered(values: float, ranks: int) -> tuple[Message, ...]:
    """``values`` of all ranks together, on every one of them."""
    return (Message("all_gather", VALUE_BYTES * values * _part_of_others(ranks)),) if ranks > 1 else ()


def _ltx2_stream(config: TransformerConfig, rows: float, width: int, head_dim: int, text: int) -> Iterator[Op]:
    """One stream of a block without the attention to itself; bytes per value are of bf16 kernels, each read and write
    counted: norms, modulation and gates, the norms and rotation of queries and keys, GELU over four widths."""
    yield _gemm(rows, width, width, 4)
    yield _elementwise(rows, width, 48, 14)
    yield _gemm(rows, width, width, 2)
    yield _attention(config.num_attention_heads, rows, text, head_dim)
    yield _elementwise(rows, width, 14, 3)
    yield _gemm(rows, width, 4 * width)
    yield _gemm(rows, 4 * width, width)
    yield _elementwise(rows, width, 30, 7)
    if config.cross_attention_adaln:
        yield _gemm(text, width, width, 2)
        yield _elementwise(text, width, 8, 2)
        yield _elementwise(rows, width, 4, 2)
    if config.gated_attention:
        yield _elementwise(rows, width, 12, 8)


def _ltx2_between(config: TransformerConfig, rows: float, tokens: Tokens, ulysses_size: int) -> Iterator[Op]:
    """The attentions between the streams, of the audio's width; a rank has some heads of that to the video."""
    width, audio = config.width, config.audio_width
    heads, head_dim = config.num_attention_heads, config.audio_attention_head_dim
    yield _gemm(rows, width, audio, 3)  # queries to the audio, keys and values for it
    yield _gemm(rows, audio, width)
    yield _gemm(tokens.audio, audio, audio, 4)
    yield _attention(heads, rows, tokens.audio, head_dim)
    yield _attention(heads / ulysses_size, tokens.audio, tokens.video, head_dim)
    yield _elementwise(rows, width, 18, 12)
    yield _elementwise(rows, audio, 34, 16)
    yield _elementwise(tokens.audio, audio, 60, 14)
    if config.gated_attention:
        yield _elementwise(rows, width, 4, 4)
    if ulysses_size > 1:
        yield _elementwise(rows, audio, 2 * VALUE_BYTES * 2, 2)


def _ltx2_audio_messages(
    config: TransformerConfig, rows: float, audio_tokens: int, ulysses_size: int
) -> tuple[Message, ...]:
    """Of video-to-audio: keys and values, then the heads of the result."""
    if ulysses_size == 1:
        return ()
    sent = 2 * VALUE_BYTES * rows * config.audio_width * _part_of_others(ulysses_size)
    return Message("all_to_all", sent), *_gathered(audio_tokens * config.audio_width, ulysses_size)


def wan_pass(config: WanTransformerConfig, tokens: Tokens, ulysses_size: int = 1) -> tuple[Part, ...]:
    """One guidance pass of a Wan transformer, as ``ltx2_pass``; tokens between blocks in fp32."""
    rows, width = -(-tokens.video // ulysses_size), config.width
    heads, head_dim = config.num_attention_heads, config.attention_head_dim
    packing, messages = _exchange(rows, width, ulysses_size)
    block = [
        _gemm(rows, width, width, 4),
        _attention(heads / ulysses_size, tokens.video, tokens.video, head_dim),
        # In fp32: norm, modulation, norms and rotation of queries and keys (whose pairs are strided), gate; casts.
        _elementwise(rows, width, 136, 18),
        *packing,
        _gemm(rows, width, width, 2),
        _attention(heads, rows, tokens.text, head_dim),
        _elementwise(rows, width, 44, 6),
        _gemm(rows, width, config.ffn_dim),
        _gemm(rows, config.ffn_dim, width),
        _elementwise(rows, width, 32, 6),
        _elementwise(rows, config.ffn_dim, 2 * VALUE_BYTES, 1),
    ]
    if tokens.image:
        block += [_attention(heads, rows, tokens.image, head_dim), _elementwise(rows, width, 6, 1)]
    patch = prod(config.patch_size)
    ends = (_gemm(rows, config.in_channels * patch, width), _gemm(rows, width, config.out_channels * patch))
    return (
        Part(tuple(block), messages, config.num_layers),
        Part(ends, _gathered(tokens.video * config.out_channels * patch, ulysses_size)),
    )


@dataclass(frozen=True)
class Layer:
    """A convolution of a decoder with what is done before and after it, over all frames.

    ``values``: elements of its input of ``height`` x ``width``, of which neighbours swap lines if it has a border;
    ``gathered``: values that all ranks need of all others.
    """

    ops: tuple[Op, ...]
    values: float = 0.0
    height: int = 1
    width: int = 1
    gathered: float = 0.0

    def line_bytes(self, axis: Literal["height", "width"]) -> float:
        return VALUE_BYTES * self.values / getattr(self, axis)


def _layer(size: Sizes, channels: tuple[int, int], moved: float, *, taps: int = 27, border: bool = True) -> Layer:
    """``channels`` in and out; ``moved``: bytes of the elementwise kernels around the convolution."""
    positions = prod(size)
    convolution = Op(
        "convolution",
        VALUE_BYTES * positions * sum(channels),
        1,
        2 * taps * positions * prod(channels),
        channels,
    )
    around = Op("vae_elementwise", moved, 12 if border else 1)
    return Layer((convolution, around), positions * channels[0] if border else 0, size[1], size[2])


_CELLS = {"compress_all": (2, 2, 2), "compress_time": (2, 1, 1), "compress_space": (1, 2, 2)}


def ltx2_decode(config: VideoDecoderConfig, latents: Sizes) -> Iterator[Layer]:
    """The layers of one call of LTX-2's decoder. Bytes per value: norm, border and SiLU 10, a residual sum 6."""
    size, channels = latents, config.base_channels * prod(block.multiplier for block in config.blocks)
    yield _layer(size, (config.latent_channels, channels), 4 * prod(size) * config.latent_channels)
    for block in config.blocks:
        values = prod(size) * channels
        if block.kind == "res_x":
            for _ in range(block.num_layers):
                yield _layer(size, (channels, channels), 10 * values)
                yield _layer(size, (channels, channels), 16 * values)
            continue
        time, space, _ = cells = _CELLS[block.kind]
        finer = (time * (size[0] - 1) + 1, space * size[1], space * size[2])
        after = channels // block.multiplier
        written = (6 if block.residual else 4) * prod(finer) * after
        yield _layer(size, (channels, after * prod(cells)), 4 * values + written)
        size, channels = finer, after
    pixels = config.out_channels * config.patch_size**2
    yield _layer(size, (channels, pixels), prod(size) * (10 * channels + 4 * pixels))


def wan_decode(config: WanVaeConfig, latents: Sizes, chunk: int | None = 1) -> Iterator[Layer]:
    """The layers of Wan's decoder, whose calls of ``chunk`` latent frames are counted together."""
    levels, size = decoder_levels(config), latents
    frames, channels = min(chunk or latents[0], latents[0]), levels[0].in_channels
    yield _layer(size, (config.z_dim, config.z_dim), 0, taps=1, border=False)
    yield _layer(size, (config.z_dim, channels), 4 * prod(size) * config.z_dim)
    yield from _wan_block(size, channels, channels, frames)
    yield _wan_attention(size, channels)
    yield from _wan_block(size, channels, channels, frames)
    for level in levels:
        for index in range(config.num_res_blocks + 1):
            yield from _wan_block(size, level.channels if index else level.in_channels, level.channels, frames)
        if level.space > 1:
            if level.time > 1:
                values = prod(size) * level.channels
                moved = (4 + _history(frames)) * values
                yield _layer(size, (level.channels, 2 * level.channels), moved, taps=3, border=False)
            size, frames = _wan_finer(size, level), frames * level.time
            added = 4 * level.resampled if config.is_residual else 0
            moved = prod(size) * (3 * level.channels + added)
            yield _layer(size, (level.channels, level.resampled), moved, taps=9)
    last = levels[-1].channels
    moved = prod(size) * ((14 + _history(frames)) * last + 6 * config.out_channels)
    yield _layer(size, (last, config.out_channels), moved)


def _wan_finer(size: Sizes, level: Level) -> Sizes:
    return (level.time * (size[0] - 1) + 1, level.space * size[1], level.space * size[2])


def _history(frames: int) -> float:
    """Bytes per value to hand two frames from a chunk of ``frames`` to the next: read and written, twice."""
    return 2 * 8 / frames


def _wan_block(size: Sizes, channels_in: int, channels: int, frames: int) -> Iterator[Layer]:
    """Bytes per value: norm, its weight, border and SiLU 14, the sum 6."""
    moved = 14 + _history(frames)
    yield _layer(size, (channels_in, channels), moved * prod(size) * channels_in)
    yield _layer(size, (channels, channels), (moved + 6) * prod(size) * channels)
    if channels_in != channels:
        yield _layer(size, (channels_in, channels), 0, taps=1, border=False)


def _wan_attention(size: Sizes, channels: int) -> Layer:
    """One head of all channels over each frame; ranks gather keys and values."""
    frames, pixels = size[0], size[1] * size[2]
    one = _attention(1, pixels, pixels, channels)
    attention = replace(one, moved=frames * one.moved, flops=frames * one.flops)
    projections = _gemm(frames * pixels, channels, 4 * channels)
    return Layer((attention, projections), gathered=2 * frames * pixels * channels)


# ---------------------------------------------------------------- plans


@dataclass(frozen=True)
class Workload:
    """What a job asks of a model, in numbers; of several requests the largest.

    ``pass_parts``: a guidance pass by ``ulysses_size``; ``velocity_bytes``: what a pass predicts, which the ranks of
    CFG exchange. ``layers``: of the decode of latents of a size; ``chunks``: in how many calls it decodes a clip.
    ``clip_bytes``: the decoded frames. ``axis``: which side a halo decode cuts. ``graph``: steps are captured.
    """

    pass_parts: Callable[[int], tuple[Part, ...]]
    velocity_bytes: float
    passes: int
    steps: int
    prompts: int
    layers: Callable[[Sizes], Iterable[Layer]]
    chunks: int
    latents: Sizes
    clip_bytes: float
    axis: Literal["height", "width", "auto"]
    tiles: TileSettings
    graph: bool = False


@dataclass(frozen=True)
class Calibration:
    """Factors of the predicted seconds of a step and of a decode, and from how many earlier runs they come."""

    step: float = 1.0
    decode: float = 1.0
    step_records: int = 0
    decode_records: int = 0


UNCALIBRATED = Calibration()


@dataclass(frozen=True)
class PlanCost:
    """Predicted of one plan: ``step_s``, ``denoise_s`` (all steps) and ``decode_s`` of one request, ``total_s`` of all
    prompts; bytes that leave or reach the busiest rank. ``extrapolated``: a group is larger than those measured."""

    plan: ParallelPlan
    decode: Decode
    step_s: float
    denoise_s: float
    decode_s: float
    total_s: float
    step_bytes: float
    decode_bytes: float
    extrapolated: bool


def predict_plan(
    plan: ParallelPlan,
    workload: Workload,
    decode: Decode,
    machine: Machine = H200,
    calibration: Calibration = UNCALIBRATED,
) -> PlanCost:
    """What ``plan`` costs with the decode that ``parallel.vae_strategy`` comes to.

    The passes of a step are taken to cost the same; the ranks of CFG run them in turns.
    """
    step = step_parts(plan, workload)
    by_rank = decode_parts(plan.vae_size, workload, decode, machine)
    step_s = calibration.step * machine.seconds(step, 0.0 if workload.graph else machine.dispatch_s)
    decode_s = calibration.decode * max(machine.seconds(parts, machine.vae_dispatch_s) for parts in by_rank)
    denoise_s = workload.steps * step_s
    turns = -(-workload.prompts // plan.data_size)
    return PlanCost(
        plan=plan,
        decode=decode,
        step_s=step_s,
        denoise_s=denoise_s,
        decode_s=decode_s,
        total_s=turns * (denoise_s + decode_s),
        step_bytes=sent_bytes(step),
        decode_bytes=max(map(sent_bytes, by_rank)),
        extrapolated=max(plan.cfg_size, plan.ulysses_size, plan.vae_size) > MEASURED_RANKS,
    )


def sent_bytes(parts: Iterable[Part]) -> float:
    return sum(part.times * message.times * message.sent for part in parts for message in part.messages)


def step_parts(plan: ParallelPlan, workload: Workload) -> tuple[Part, ...]:
    """One denoising step on the rank with most passes."""
    turns = -(-workload.passes // plan.cfg_size)
    run = [replace(part, times=turns * part.times) for part in workload.pass_parts(plan.ulysses_size)]
    if plan.cfg_size > 1 and workload.passes > 1:
        run.append(Part(messages=(Message("all_gather", (plan.cfg_size - 1) * turns * workload.velocity_bytes),)))
    return tuple(run)


def decode_parts(ranks: int, workload: Workload, decode: Decode, machine: Machine) -> tuple[tuple[Part, ...], ...]:
    """The decode of one clip, rank by rank; of ranks that do alike only one."""
    if decode in ("tile", "tile_balanced"):
        return _tile_parts(ranks, workload, decode, machine)
    if decode == "whole" or ranks == 1:
        return (tuple(Part(layer.ops) for layer in workload.layers(workload.latents)),)
    return (_halo_parts(ranks, workload),)


def _halo_parts(ranks: int, workload: Workload) -> tuple[Part, ...]:
    """The longest band, the lines that it gives to a neighbour while it gets others, and its frames' way to the first
    rank, which gets those of one rank after another."""
    frames, height, width = workload.latents
    axis = _halo_axis(ranks, workload)
    band = (frames, -(-height // ranks), width) if axis == "height" else (frames, height, -(-width // ranks))
    parts = [
        Part(_halo_ops(layer, ranks), _halo_messages(layer, ranks, workload.chunks, axis))
        for layer in workload.layers(band)
    ]
    from_each = Message("send_recv", workload.clip_bytes / ranks / workload.chunks, (ranks - 1) * workload.chunks)
    return (*parts, Part((Op("elementwise", 2 * workload.clip_bytes, ranks),), (from_each,)))


def _halo_ops(layer: Layer, ranks: int) -> tuple[Op, ...]:
    """The band's pixels attend to those of all bands."""
    if not layer.gathered:
        return layer.ops
    return tuple(replace(op, flops=ranks * op.flops) if op.kind == "attention" else op for op in layer.ops)


def _halo_axis(ranks: int, workload: Workload) -> Literal["height", "width"]:
    """As ``halo.choose_axis``, which needs torch."""
    if workload.axis != "auto":
        return workload.axis
    _, height, width = workload.latents
    by_height = (ranks > height, -(-height // ranks) * width, width)
    return "height" if by_height <= (ranks > width, height * -(-width // ranks), height) else "width"


def _halo_messages(layer: Layer, ranks: int, chunks: int, axis: Literal["height", "width"]) -> tuple[Message, ...]:
    if layer.gathered:
        # ``gathered`` is of one rank's band: as much comes from each other rank.
        return (Message("all_gather", VALUE_BYTES * layer.gathered * (ranks - 1) / chunks, chunks),)
    if not layer.values:
        return ()
    return (Message("send_recv", layer.line_bytes(axis) / chunks, chunks),)


def _tile_parts(ranks: int, workload: Workload, decode: Decode, machine: Machine) -> tuple[tuple[Part, ...], ...]:
    """Each rank's tiles, and the sum of the clip over the ranks."""
    tiles = _grid(ranks, workload, decode)
    pixels = workload.clip_bytes / prod(workload.latents)
    # The sum over all tiles, divided.
    ending = Part((Op("elementwise", 2 * workload.clip_bytes, 4),), _sums(workload.clip_bytes, ranks))
    by_rank = []
    for own in assign_tiles(tiles, ranks):
        parts = [part for index in own for part in _tile(tiles[index], workload, pixels)]
        by_rank.append((*parts, ending))
    return tuple(sorted(by_rank, key=lambda parts: -machine.seconds(parts)))


def _grid(ranks: int, workload: Workload, decode: Decode) -> tuple[Tile, ...]:
    return plan_grid(workload.latents, workload.tiles, ranks, balanced=decode != "tile")


def _sums(clip_bytes: float, ranks: int) -> tuple[Message, ...]:
    return (Message("reduce", clip_bytes),) if ranks > 1 else ()


def _tile(tile: Tile, workload: Workload, pixel_bytes: float) -> Iterator[Part]:
    """A tile's decode, and its weighted addition to the sum: read both, write one."""
    frames, height, width = (
        span.latent_stop - span.latent_start for span in (tile.time, tile.height, tile.width)
    )  # fmt: skip
    for layer in workload.layers((frames, height, width)):
        yield Part(layer.ops)
    yield Part((Op("vae_elementwise", 4 * frames * height * width * pixel_bytes, 4),))


# ---------------------------------------------------------------- what earlier runs took


def calibrate(
    records: Iterable[Mapping[str, Any]], workload: Workload, same: Mapping[str, Any], machine: Machine = H200
) -> Calibration:
    """Factors by which earlier runs took longer than predicted: the medians of measured / predicted.

    ``records``: mappings of ``record.json``. Only those count that ended well on a GPU of this ``machine``, and that
    have the values ``same`` by dotted path (``config.model.name``, ``config.request.height``, ...).
    """
    steps, decodes = [], []
    for record in records:
        if not _is_comparable(record, same, machine):
            continue
        active, times = record["active"], _warm_times(record["timings_s"])
        plan = ParallelPlan(*(active[name] for name in ("data_size", "cfg_size", "ulysses_size", "vae_size")))
        passes = len(active["passes"] or ()) or workload.passes
        cost = predict_plan(plan, replace(workload, passes=passes), active["vae_strategy"] or "whole", machine)
        if times.get("denoise_steps"):
            steps.append(statistics.median(times["denoise_steps"]) / cost.step_s)
        if times.get("decode_video"):
            decodes.append(times["decode_video"] / cost.decode_s)
    return Calibration(statistics.median(steps or [1.0]), statistics.median(decodes or [1.0]), len(steps), len(decodes))


def _is_comparable(record: Mapping[str, Any], same: Mapping[str, Any], machine: Machine) -> bool:
    gpu = _at(record, "environment.gpu.name")
    return (
        record.get("status") == "ok"
        and isinstance(gpu, str)
        and machine.name in gpu
        and all(_at(record, path) == value for path, value in same.items())
    )


def _at(record: Mapping[str, Any], path: str) -> Any:
    value: Any = record
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _warm_times(timings: Mapping[str, Any]) -> Mapping[str, Any]:
    """One request's stages: of a warm one, or of the only one without its first step and without its decode."""
    if timings.get("warm"):
        warm: Mapping[str, Any] = timings["warm"]
        return warm
    cold = timings.get("cold") or {}
    return {"denoise_steps": (cold.get("denoise_steps") or ())[1:]}
