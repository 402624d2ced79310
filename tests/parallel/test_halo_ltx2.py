"""Ranks with a band each against one rank with the clip, on every kind of LTX-2 decoder and encoder."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.ranks import run_ranks
from vgen.models.ltx2.config import DecoderBlock, EncoderBlock, VideoDecoderConfig, VideoEncoderConfig
from vgen.models.ltx2.video_encoder import VideoEncoder
from vgen.models.ltx2.video_vae import BORDERS, BorderedConv3d, FillBorder, VideoDecoder, reflect_border
from vgen.parallel.halo import DIMS, Axis
from vgen.parallel.halo_ltx2 import HaloDecoder, HaloEncoder

CHANNELS_LAST = torch.channels_last_3d

UPS = {
    "2.0": (("compress_all", 2, True),) * 3,
    "2.3": (
        ("compress_all", 2, False),
        ("compress_all", 1, False),
        ("compress_time", 2, False),
        ("compress_space", 2, False),
    ),
    "wide": (("compress_all", 1, False),) * 3,
}
"""Upsampling blocks: kind, multiplier, residual. In the wide one the peak is where lines are exchanged, as in 2.0."""

DOWNS = {"2.0": (2, 2, 2, 2), "2.3": (2, 2, 2, 1)}
"""Multipliers of the downsampling blocks."""

KINDS = ("compress_space_res", "compress_time_res", "compress_all_res", "compress_all_res")


def decoder_config(version: str, padding: str) -> VideoDecoderConfig:
    blocks = [DecoderBlock("res_x")]
    for kind, multiplier, residual in UPS[version]:
        blocks += [DecoderBlock(kind, multiplier=multiplier, residual=residual), DecoderBlock("res_x")]
    return VideoDecoderConfig(8, 3, 64 if version == "wide" else 4, 4, tuple(blocks), padding, False)


def encoder_config(version: str, padding: str) -> VideoEncoderConfig:
    blocks = [EncoderBlock("res_x")]
    for kind, multiplier in zip(KINDS, DOWNS[version], strict=True):
        blocks += [EncoderBlock(kind, multiplier=multiplier), EncoderBlock("res_x")]
    return VideoEncoderConfig(3, 8, 4, tuple(blocks), padding)


@dataclass(frozen=True)
class Case:
    """``latents``: batch, frames, height and width of the clip in latents; ``ranks``: those of the group."""

    half: str
    version: str
    padding: str
    latents: tuple[int, int, int, int]
    axis: Axis
    ranks: tuple[int, ...]
    channels_last: bool = False
    to_first_only: bool = True


def build(case: Case, dtype: torch.dtype) -> tuple[VideoDecoder | VideoEncoder, Tensor]:
    """The half of the VAE with random weights that keep activations near 1, and a random input for it."""
    generator = torch.Generator().manual_seed(5)
    half: VideoDecoder | VideoEncoder
    B, frames, H, W = case.latents
    if case.half == "decoder":
        half, shape = VideoDecoder(decoder_config(case.version, case.padding)), (B, 8, frames, H, W)
    else:
        half, shape = VideoEncoder(encoder_config(case.version, case.padding)), (B, 3, 8 * frames - 7, 32 * H, 32 * W)
    for tensor in half.parameters():
        fan_in = tensor[0].numel() if tensor.ndim > 1 else 4
        tensor.data = torch.randn(tensor.shape, generator=generator) / fan_in**0.5
    for buffer in half.buffers():
        buffer.data = 0.5 + torch.rand(buffer.shape, generator=generator)
    half.to(dtype, memory_format=CHANNELS_LAST if case.channels_last else torch.preserve_format)
    return half.eval(), torch.randn(shape, generator=generator).to(dtype)


def adapter(case: Case, half: nn.Module, group: Any) -> HaloDecoder | HaloEncoder:
    kind: Any = HaloDecoder if case.half == "decoder" else HaloEncoder
    made: HaloDecoder | HaloEncoder = kind(half, case.axis, group, to_first_only=case.to_first_only)
    return made


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max()).item()


@dataclass
class Found:
    """What one rank saw: errors by case and dtype; lines sent and convolutions' inputs; bytes by number of ranks."""

    errors: list[dict[torch.dtype, float]]
    sent: list[tuple[int, int]]
    expected: list[tuple[int, int]]
    peaks: dict[int, int]


def run_all(cases: Sequence[Case]) -> Found:
    """Everything that needs ranks, in one start of them."""
    rank = dist.get_rank()
    everyone = dict.fromkeys((*(case.ranks for case in cases), MESSAGES.ranks, *(case.ranks for case in MEMORY)))
    groups = {ranks: dist.new_group(list(ranks)) for ranks in everyone}
    found = Found([errors(case, groups[case.ranks]) if rank in case.ranks else {} for case in cases], [], [], {})
    if rank in MESSAGES.ranks:
        found.sent, found.expected = messages(MESSAGES, groups[MESSAGES.ranks])
    for case in MEMORY:
        if rank == case.ranks[-1]:
            found.peaks[1] = memory(case, None)
        if rank in case.ranks:
            found.peaks[len(case.ranks)] = memory(case, groups[case.ranks])
    return found


def empty_of_nan(*args: Any, empty: Callable[..., Tensor] = torch.empty, **kwargs: Any) -> Tensor:
    """In place of ``torch.empty``, so that what is read before it is written shows."""
    return empty(*args, **kwargs).fill_(torch.nan)


def borders(half: nn.Module) -> set[FillBorder]:
    return {module.fill_border for module in half.modules() if isinstance(module, BorderedConv3d)}


def errors(case: Case, group: dist.ProcessGroup) -> dict[torch.dtype, float]:
    result = {}
    for dtype in (torch.float64, torch.float32):
        half, x = build(case, dtype)
        before = x.clone()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "empty", empty_of_nan)
            actual = adapter(case, half, group)(x)
        assert torch.equal(x, before)
        assert borders(half) == {BORDERS[case.padding]}
        assert (actual is None) == (case.to_first_only and group.rank() > 0)
        if actual is None:
            continue
        expected = half(x)
        assert actual.shape == expected.shape and actual.dtype == expected.dtype
        assert actual.is_contiguous(memory_format=CHANNELS_LAST if case.channels_last else torch.contiguous_format)
        result[dtype] = relative_error(actual, expected)
    return result


def messages(case: Case, group: dist.ProcessGroup) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(target, values) of each message in order, and what one line per neighbour and convolution would be."""
    sent: list[tuple[int, int]] = []
    expected: list[tuple[int, int]] = []
    send, dim, rank = dist.batch_isend_irecv, DIMS[case.axis], group.rank()

    def counting(ops: list[dist.P2POp]) -> Any:
        sends = [op for op in ops if op.op is dist.isend]
        sent.extend(sorted((dist.get_group_rank(group, op.peer), op.tensor.numel()) for op in sends))
        return send(ops)

    def expecting(conv: nn.Module, inputs: tuple[Tensor]) -> None:
        line = inputs[0].select(dim, 0).numel()
        expected.extend((other, line) for other in (rank - 1, rank + 1) if 0 <= other < group.size())

    half, x = build(case, torch.float32)
    for module in half.modules():
        if isinstance(module, nn.Conv3d):
            module.register_forward_pre_hook(expecting)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", counting)
        adapter(case, half, group)(x)
    return sent, expected


def memory(case: Case, group: dist.ProcessGroup | None) -> int:
    from tests.test_memory import least_peak_of  # here, because it takes each process a second

    half, x = build(case, torch.float32)
    run: Any = half if group is None else adapter(case, half, group)
    return least_peak_of(lambda: run(x))


def random_cases(count: int, seed: int) -> list[Case]:
    """Groups of 2 to 4 of the world's four ranks, axes with a line of latents for each rank or more."""
    choose = random.Random(seed)
    cases = []
    for index in range(count):
        ranks = choose.choice(((0, 1), (1, 3), (2, 3), (0, 1, 2), (1, 2, 3), (0, 1, 2, 3)))
        axis: Axis = choose.choice(("height", "width"))
        long, short = choose.randint(len(ranks), 2 * len(ranks) + 1), choose.choice((2, 3))
        sides = (long, short) if axis == "height" else (short, long)
        padding = choose.choice(("reflect", "zeros"))
        half = "encoder" if index % 3 == 2 else "decoder"
        latents = (choose.choice((1, 2)), choose.choice((1, 2, 3) if half == "decoder" else (1, 2)), *sides)
        version = choose.choice(("2.0", "2.3"))
        cases.append(Case(half, version, padding, latents, axis, ranks, choose.random() < 0.5, choose.random() < 0.5))
    return cases


EIGHT, FOUR, THREE, TWO = tuple(range(8)), (0, 1, 2, 3), (1, 2, 3), (1, 3)

NAMED = [
    # One line of latents per rank: the outer bands reflect a line of their neighbour's.
    Case("decoder", "2.0", "reflect", (1, 2, 4, 2), "height", FOUR),
    Case("decoder", "2.0", "reflect", (1, 2, 2, 3), "width", THREE, channels_last=True),
    Case("decoder", "2.0", "reflect", (1, 1, 2, 2), "height", TWO),
    Case("encoder", "2.0", "reflect", (1, 1, 2, 2), "width", TWO),
    Case("encoder", "2.3", "reflect", (1, 2, 4, 2), "height", FOUR, channels_last=True),
    # Uneven bands, with every rank getting the whole.
    Case("decoder", "2.0", "reflect", (2, 2, 7, 2), "height", THREE, to_first_only=False),
    Case("decoder", "2.3", "zeros", (1, 2, 2, 7), "width", FOUR, channels_last=True, to_first_only=False),
    Case("encoder", "2.0", "zeros", (2, 2, 5, 2), "height", THREE, to_first_only=False),
    Case("encoder", "2.3", "zeros", (1, 2, 2, 5), "width", FOUR, channels_last=True),
    # A single line across, which only zeros can pad.
    Case("decoder", "2.3", "zeros", (1, 2, 1, 3), "width", TWO),
    # 1088 pixels on eight ranks, four or five lines each; the longer axis is found.
    Case("decoder", "2.0", "reflect", (1, 2, 34, 2), "auto", EIGHT, channels_last=True),
    Case("encoder", "2.3", "zeros", (1, 1, 2, 3), "auto", THREE),
]

CASES = NAMED + random_cases(12, seed=3)
MESSAGES = Case("decoder", "2.3", "zeros", (2, 2, 5, 2), "height", THREE, to_first_only=False)
MEMORY = [Case("decoder", "wide", "reflect", (1, 1, 16, 2), "height", ranks) for ranks in (TWO, FOUR)]


@pytest.fixture(scope="module")
def found() -> list[Found]:
    return run_ranks(8, run_all, CASES)


def test_bands_give_the_whole(found: list[Found]) -> None:
    for index, case in enumerate(CASES):
        by_rank = [rank.errors[index] for rank in found]
        having = [rank for rank, errors in enumerate(by_rank) if errors]
        assert having == list(case.ranks[:1] if case.to_first_only else case.ranks), case
        for errors in filter(None, by_rank):
            assert errors[torch.float64] <= 2e-15, (case, errors)
            assert errors[torch.float32] <= 1e-6, (case, errors)


def test_one_line_to_each_neighbour_per_convolution(found: list[Found]) -> None:
    half, _ = build(MESSAGES, torch.float32)
    convolutions = sum(isinstance(module, BorderedConv3d) for module in half.modules())
    for rank, neighbours in zip(MESSAGES.ranks, (1, 2, 1), strict=True):
        assert len(found[rank].sent) == neighbours * convolutions
        assert found[rank].sent == found[rank].expected


def test_memory_falls_with_the_ranks(found: list[Found]) -> None:
    """On all ranks but the first, which also has the frames of all: two lines more than its share."""
    whole = found[TWO[-1]].peaks[1]
    assert found[TWO[-1]].peaks[2] < 0.52 * whole
    for rank in FOUR[1:]:
        assert found[rank].peaks[4] < 0.28 * whole


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_the_module_is_its_own_after_a_failure(kind: str) -> None:
    case = Case(kind, "2.0", "reflect", (1, 1, 3, 2), "height", (0, 1))
    half, x = build(case, torch.float32)
    expected = half(x)
    with pytest.raises(ValueError, match="group"):
        adapter(case, half, fake_group(2))(x)
    assert torch.equal(half(x), expected)
    assert borders(half) == {reflect_border}


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_refuses_in_one_sentence(kind: str) -> None:
    case = Case(kind, "2.0", "reflect", (1, 1, 3, 2), "width", (0, 1, 2))
    half, x = build(case, torch.float32)
    with pytest.raises(ValueError, match=r"fewer than the 3 ranks.*cut the other axis"):
        adapter(case, half, fake_group(3))(x)
    with pytest.raises(ValueError, match="height is 1" if kind == "decoder" else "height=32"):
        adapter(case, half, fake_group(2))(x[..., : x.shape[3] // 3, :])
    with pytest.raises(ValueError, match=r"axis='depth'.*use height, width or auto"):
        adapter(replace(case, axis="depth"), half, fake_group(2))  # type: ignore[arg-type]


def fake_group(ranks: int) -> Any:
    """As far as arguments are checked; whatever is sent over it fails."""
    return SimpleNamespace(size=lambda: ranks, rank=lambda: 0)
