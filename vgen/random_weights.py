"""Random weights for an architecture of any size, the same bits on every rank, device and chunking.

Element ``i`` of the tensor ``name`` is a function of (seed, name, i) only: a counter-based hash in int64 operations,
which are exact everywhere. Its upper 24 bits become an odd integer in (-2^24, 2^24), exact in fp32; one multiplication
and one addition in fp32 follow, as separate operations that IEEE 754 rounds in one way only (no fused multiply-add),
then the cast. So CPU and GPU agree to the last bit, and 19 billion parameters are made on a GPU in seconds.

What each tensor is scaled to is data, ``RULES``: activations keep a standard deviation of about 0.1 to 10 through 48
transformer blocks, the decoders and the vocoder, so that timings, memory and numeric checks mean something.
"""

import hashlib
import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from vgen.checkpoint import place_tensor, settle
from vgen.models.ltx2.snake import kaiser_filter
from vgen.models.ltx2.upsampler import BINOMIAL

CHUNK = 1 << 23
"""Elements made at once: 8 bytes of counter, 8 of scratch and 4 of fp32 each, 160 MiB."""

_MASK = (1 << 32) - 1


@dataclass(frozen=True)
class Rule:
    """How to draw the tensors whose full name ``pattern`` finds: uniform with mean ``centre`` and deviation ``std``.

    ``std`` None means ``gain / sqrt(fan_in)``, ``fan_in`` being the product of all dims but the first. For a transposed
    convolution it is twice the input channels: a kernel of k at stride s adds up k/s inputs, 2 to 4 of them in LTX-2.
    ``compute`` gives a tensor of that shape, on the CPU, in place of drawing: for constants of all checkpoints.
    """

    pattern: str
    centre: float = 0.0
    std: float | None = None
    transposed: bool = False
    gain: float = 1.0
    compute: Callable[[torch.Size], torch.Tensor] | None = None


def low_pass(shape: torch.Size) -> torch.Tensor:
    """The filter [1, 1, 12] of the 2.3 vocoder's activations."""
    return kaiser_filter().view(shape)


def blur(shape: torch.Size) -> torch.Tensor:
    """The kernel [1, 1, 5, 5] of the upsamplers' rational resampling."""
    row = torch.tensor(BINOMIAL, dtype=torch.float32)
    return (torch.outer(row, row) / row.sum() ** 2).view(shape)


def fourier_basis(shape: torch.Size) -> torch.Tensor:
    """Cosines, then sines, of all frequencies under a Hann window: [2 * (n / 2 + 1), 1, n]."""
    rows, _, samples = shape
    angles = torch.outer(torch.arange(rows // 2), torch.arange(samples)).double() * (2 * math.pi / samples)
    window = torch.hann_window(samples, dtype=torch.float64)
    return (torch.cat([angles.cos(), -angles.sin()]) * window).unsqueeze(1)


def mel_basis(shape: torch.Size) -> torch.Tensor:
    """Triangles [mel bins, frequencies] with sum 1, equally spaced in mels up to 8 kHz (HTK's formula)."""
    bins, frequencies = shape
    mels = 2595 * torch.log10(1 + torch.linspace(0, 8000, frequencies, dtype=torch.float64) / 700)
    position = mels / mels[-1] * (bins + 1)
    triangles = (1 - (position - torch.arange(1, bins + 1)[:, None]).abs()).clamp(min=0) + 1e-6
    return triangles / triangles.sum(dim=1, keepdim=True)


RULES = (
    Rule(r"std-of-means$", centre=1.0, std=0.15),  # uniform, so never below 0.74
    Rule(r"mean-of-means$", std=0.2),
    Rule(r"scale_shift_table", std=0.2),
    Rule(r"\.act\.(alpha|beta)$", std=0.1),  # logarithms
    Rule(r"\.filter$", compute=low_pass),
    Rule(r"\.blur_down\.kernel$", compute=blur),
    Rule(r"\.(forward|inverse)_basis$", compute=fourier_basis),
    Rule(r"\.mel_basis$", compute=mel_basis),
    Rule(r"learnable_registers$", std=1.0),  # like the text features that they stand beside
    # Gemma-3 multiplies by 1 + weight, LTX-2 by weight.
    Rule(r"\.self_attn\.[qk]_norm\.weight$|_layernorm\.weight$|^text_encoder\.norm\.weight$", std=0.1),
    Rule(r"(norm\d*|norm_(q|k|added_k))\.weight$|\.gamma$", centre=1.0, std=0.1),
    Rule(r"(class_embedding|pos_embed)$", std=0.2),
    Rule(r"bias$", std=0.02),
    Rule(r"^vocoder\.((vocoder|bwe_generator)\.)?ups\.\d+\.weight$", transposed=True),
    # SnakeBeta adds to its input, so 2.3's residual blocks would grow; its waveforms would be clamped.
    Rule(r"^vocoder\.(vocoder|bwe_generator)\.resblocks\.\d+\.convs2\.\d+\.weight$", gain=0.5),
    Rule(r"^vocoder\.(vocoder|bwe_generator)\.conv_post\.weight$", gain=0.1),
    Rule(r"weight$"),
)
"""First match wins. A full name starts with its component's, which a pattern may ask for."""


def fill_random(
    module: nn.Module,
    *,
    seed: int,
    device: torch.device | str,
    dtype: torch.dtype,
    prefix: str = "",
    keep_float32: Callable[[str], bool] | None = None,
    rules: tuple[Rule, ...] = RULES,
    chunk: int = CHUNK,
) -> None:
    """Give ``module``, built on the meta device, random parameters and persistent buffers, in place.

    Args:
        prefix: the component's name, such as ``transformer``; with a dot and the parameter's name it is the full name.
        keep_float32: whether the tensor of this name, without ``prefix``, is fp32 whatever ``dtype`` is; None is none.
        chunk: elements made at once; the values do not depend on it.

    Raises:
        ValueError: no rule knows a tensor's name, or a tensor is not floating-point.
    """
    device = torch.device(device)
    for name, tensor in module.state_dict(keep_vars=True).items():
        full_name = f"{prefix}.{name}" if prefix else name
        rule = _rule(full_name, rules)
        if not tensor.is_floating_point():
            raise ValueError(f"'{full_name}' is {tensor.dtype}; random weights are for floating-point tensors only")
        to_dtype = torch.float32 if keep_float32 is not None and keep_float32(name) else dtype
        if rule.compute is not None:
            place_tensor(module, name, rule.compute(tensor.shape).to(to_dtype).to(device))
            continue
        std = rule.gain / math.sqrt(_fan_in(tensor.shape, rule.transposed)) if rule.std is None else rule.std
        flat = random_tensor(tensor.numel(), full_name, seed, rule.centre, std, device, to_dtype, chunk)
        place_tensor(module, name, flat.view(tensor.shape))
    settle(module, device)


def random_tensor(
    size: int,
    name: str,
    seed: int,
    centre: float,
    std: float,
    device: torch.device | str,
    dtype: torch.dtype,
    chunk: int = CHUNK,
) -> torch.Tensor:
    """Values [size], uniform with mean ``centre`` and deviation ``std``, that depend on ``seed`` and ``name``.

    ``centre`` and the scale are rounded to fp32 first, so that every device computes with the same numbers.
    """
    scale = _fp32(std * math.sqrt(3.0) / (1 << 24))
    centre = _fp32(centre)
    out = torch.empty(size, dtype=dtype, device=device)
    start = 0
    while start < size:
        block = start >> 32
        stop = min(start + chunk, size, (block + 1) << 32)
        bits = _hash(start - (block << 32), stop - start, _keys(seed, name, block), device)
        values = bits.bitwise_right_shift_(8).mul_(2).add_(1 - (1 << 24)).to(torch.float32)
        out[start:stop] = values.mul_(scale).add_(centre)
        start = stop
    return out


def _rule(name: str, rules: tuple[Rule, ...]) -> Rule:
    for rule in rules:
        if re.search(rule.pattern, name):
            return rule
    raise ValueError(f"no rule says how to draw '{name}'; add one to vgen/random_weights.py")


def _fan_in(shape: torch.Size, transposed: bool) -> int:
    return 2 * shape[0] if transposed else math.prod(shape[1:])


def _fp32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


def _keys(seed: int, name: str, block: int) -> tuple[int, int]:
    digest = hashlib.blake2b(f"{seed}/{block}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def _hash(start: int, count: int, key: tuple[int, int], device: torch.device | str) -> torch.Tensor:
    """32 random bits per counter ``start``, ``start + 1``, …: int64 [count], in [0, 2^32).

    Two rounds, because one would give every name a permutation of the same numbers.
    """
    x = torch.arange(start, start + count, dtype=torch.int64, device=device)
    scratch = torch.empty_like(x)
    for round_key in key:
        x.bitwise_xor_(round_key)
        _mix(x, scratch)
    return x


def _mix(x: torch.Tensor, scratch: torch.Tensor) -> None:
    """A bijection of 32-bit integers that spreads each bit over all, in place.

    Shifts and multipliers: hash-prospector's ``[16 21f0aaad 15 735a2d97 15]`` (github.com/skeeto/hash-prospector,
    issue 19). Both multipliers are below 2^31, so a product with 32 bits never overflows int64.
    """
    for shift, multiplier in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        torch.bitwise_right_shift(x, shift, out=scratch)
        x.bitwise_xor_(scratch).mul_(multiplier).bitwise_and_(_MASK)
    torch.bitwise_right_shift(x, 15, out=scratch)
    x.bitwise_xor_(scratch)
