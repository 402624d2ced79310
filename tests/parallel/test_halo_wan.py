"""Wan's VAEs over ranks against the same VAE alone: values, what is sent, memory format, memory, and the way back."""

import itertools
import random
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.ranks import run_ranks
from vgen.models.wan import vae_levels
from vgen.models.wan.config import VAE_2_1, VAE_2_2
from vgen.models.wan.vae import VideoDecoder, VideoEncoder
from vgen.models.wan.vae_blocks import FrameAttention, FrameConv, apply_channels_last
from vgen.models.wan.vae_levels import decoder_levels, largest_decoder_tensor, most_decoder_frames
from vgen.parallel import halo_wan
from vgen.parallel.halo import Axis
from vgen.parallel.halo_wan import HaloDecoder, HaloEncoder
from vgen.parallel.vae import from_vae

CHANNELS_LAST = torch.channels_last_3d
CONFIGS = {"2.1": replace(VAE_2_1, base_dim=4), "2.2": replace(VAE_2_2, base_dim=8, decoder_base_dim=4)}
BOUNDS = {torch.float64: 1e-14, torch.float32: 1e-6}
"""Measured: 1.6e-15 and 6.1e-7."""
ADAPTERS = {"decode": HaloDecoder, "encode": HaloEncoder}


@dataclass(frozen=True)
class Case:
    """``size``: of the latents, ``frames`` latent frames of them."""

    way: Literal["decode", "encode"]
    kind: str
    axis: Axis
    size: tuple[int, int]
    frames: int = 3
    chunk: int | None = 1
    batch: int = 1
    dtype: torch.dtype = torch.float64
    channels_last: bool = True
    to_first_only: bool = True


@cache
def build(way: str, kind: str, dtype: torch.dtype, channels_last: bool) -> nn.Module:
    """Random weights that keep activations near 1, and gains away from 1."""
    generator = torch.Generator().manual_seed(1)
    half: nn.Module = VideoDecoder(CONFIGS[kind]) if way == "decode" else VideoEncoder(CONFIGS[kind])
    for name, tensor in half.named_parameters():
        if name.endswith("gamma"):
            tensor.data = 0.5 + torch.rand(tensor.shape, generator=generator)
        else:
            fan_in = tensor[0].numel() if tensor.ndim > 1 else 4
            tensor.data = torch.randn(tensor.shape, generator=generator) / fan_in**0.5
    half.to(dtype).requires_grad_(False)
    if channels_last:
        apply_channels_last(half)
    return half


def inputs(case: Case) -> Tensor:
    config = CONFIGS[case.kind]
    generator = torch.Generator().manual_seed(2)
    shape = [case.batch, config.z_dim, case.frames, *case.size]
    if case.way == "encode":
        shape[1:] = [3, 4 * (case.frames - 1) + 1, *(config.scale_factor_spatial * side for side in case.size)]
    return torch.randn(shape, generator=generator).to(case.dtype)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def error(case: Case, group: Any) -> float | None:
    half, x = build(case.way, case.kind, case.dtype, case.channels_last), inputs(case)
    shared = ADAPTERS[case.way](half, case.axis, group, to_first_only=case.to_first_only)
    got = shared(x, case.chunk)
    return None if got is None else relative_error(got, half(x, case.chunk))


def drawn_cases(ranks: int) -> list[Case]:
    """Both ways, VAEs and axes at an uneven cut, and one of each way and VAE with all else drawn by a fixed seed."""
    draw = random.Random(ranks)
    cases = []
    for way, kind in itertools.product(ADAPTERS, CONFIGS):
        cases += [Case(way, kind, "height", (ranks + 1, 1), frames=2), Case(way, kind, "width", (1, ranks + 1))]
        size = [draw.randint(ranks, 2 * ranks), draw.randint(1, 3)]
        axis = draw.choice(list[Axis](["height", "width", "auto"]))
        cases.append(
            Case(
                way,
                kind,
                axis,
                tuple(size if axis == "height" else size[::-1]),
                frames=draw.choice([1, 2, 3]),
                chunk=draw.choice([1, 2, None]),
                batch=draw.choice([1, 2]),
                dtype=draw.choice(list(BOUNDS)),
                channels_last=draw.random() < 0.5,
                to_first_only=draw.random() < 0.5,
            )
        )
    return cases


CASES = {
    **{ranks: drawn_cases(ranks) for ranks in (2, 3, 4)},
    8: [Case("decode", "2.1", "height", (34, 1), frames=2, dtype=dtype) for dtype in BOUNDS],
}
GROUPS = {2: [1, 6], 3: [0, 3, 5], 4: [2, 4, 6, 7], 8: list(range(8))}
"""Ranks of the world: a group's own numbers are no address for its neighbours."""


@cache
def results() -> list[dict[str, Any]]:
    """By rank of the world what each of its groups found: all tests share one start of 8 processes."""
    return run_ranks(8, examine)


def examine() -> dict[str, Any]:
    groups = {size: dist.new_group(ranks) for size, ranks in GROUPS.items()}
    found: dict[str, Any] = {}
    for size, group in groups.items():
        if dist.get_rank() in GROUPS[size]:
            found[f"errors of {size}"] = [error(case, group) for case in CASES[size]]
    if dist.get_rank() in GROUPS[2]:
        found["seams"] = seams_and_way_back(groups[2])
        found["exchanges"] = exchanges(groups[2])
        found["row major"] = row_major_inputs(groups[2])
        found["peaks"] = peaks(groups[2])
        found["chunks"] = common_chunks(groups[2])
        found["refused"] = [refusal(case, groups[2]) for case, _ in REFUSED]
    return found


def found_by(ranks: int, what: str) -> list[Any]:
    return [results()[rank][what] for rank in GROUPS[ranks]]


@pytest.mark.parametrize("ranks", CASES)
def test_any_cut_gives_the_whole(ranks: int) -> None:
    """Of both ways, both VAEs, both axes; and 34 rows on 8 ranks."""
    by_case = zip(*found_by(ranks, f"errors of {ranks}"), strict=True)
    for case, by_rank in zip(CASES[ranks], by_case, strict=True):
        receivers = 1 if case.to_first_only else ranks
        assert [found is None for found in by_rank] == [False] * receivers + [True] * (ranks - receivers), case
        assert max(by_rank[:receivers]) <= BOUNDS[case.dtype], (case, by_rank)


def seams(half: nn.Module) -> list[Any]:
    return [
        getattr(module, name)
        for module in half.modules()
        for name in ("fill_border", "attend")
        if hasattr(module, name)
    ]


def seams_and_way_back(group: Any) -> dict[str, Any]:
    case = Case("decode", "2.2", "height", (3, 1))
    half, x = build(case.way, case.kind, case.dtype, True), inputs(case)
    before, weights, whole = seams(half), list(half.state_dict().values()), half(x)
    shared = from_vae(half, "auto", group, to_first_only=False)
    first, again = shared(x), shared(x)
    return {
        "type": type(shared).__name__,
        "replaced": sum(a is not b for a, b in zip(before, seams(half), strict=True)),
        "weights": all(a.data_ptr() == b.data_ptr() for a, b in zip(weights, half.state_dict().values(), strict=True)),
        "whole": torch.equal(half(x), whole),
        "again": torch.equal(first, again),
    }


def exchanges(group: Any) -> list[tuple[int, int]]:
    """For each chunk how often lines were swapped, and how many elements went to the next rank."""
    case = Case("decode", "2.1", "height", (2, 1), frames=3)
    half = build(case.way, case.kind, case.dtype, True)
    shared = HaloDecoder(half, "height", group)
    sent: list[int] = []
    exchange_lines = halo_wan.exchange_lines

    def counted(first: Tensor | None, last: Tensor | None, group: Any) -> Any:
        sent.append(0 if last is None else last.numel())
        return exchange_lines(first, last, group)

    halo_wan.exchange_lines = counted
    counts = []
    for _ in shared.decode(inputs(case), 1):
        counts.append((len(sent), sum(sent)))
        sent.clear()
    halo_wan.exchange_lines = exchange_lines
    return counts


def row_major_inputs(group: Any) -> list[str]:
    """Convolutions and attentions that read something else than channels-last, and results that are something else."""
    names = []
    for way in ADAPTERS:
        case = Case(way, "2.2", "width", (2, 5), frames=4, dtype=torch.float32)
        half = build(way, case.kind, case.dtype, True)

        def check(name: str, inputs: tuple[Tensor, ...]) -> None:
            if not inputs[0].is_contiguous(memory_format=CHANNELS_LAST):
                names.append(name)

        hooks = []
        for name, module in half.named_modules():
            if isinstance(module, nn.Conv3d | FrameConv):
                # As on CUDA a convolution answers in the format of its input; on the CPU that depends on the machine.
                hooks.append(
                    module.register_forward_hook(lambda _, x, out: out.contiguous(memory_format=CHANNELS_LAST))
                )
            if isinstance(module, nn.Conv3d | FrameConv | FrameAttention):
                hooks.append(
                    module.register_forward_pre_hook(lambda _, x, name=name, way=way: check(f"{way} {name}", x))
                )
        shared = ADAPTERS[way](half, case.axis, group, to_first_only=False)
        check(way, (shared(inputs(case), 2),))
        assert len(hooks) > 50
        for hook in hooks:
            hook.remove()
    return names


def peaks(group: Any) -> dict[str, tuple[int, int]]:
    """Bytes alive at once in one rank's share and in the whole."""
    from tests.test_memory import least_peak_of, peak_of

    result = {}
    for way in ADAPTERS:
        case = Case(way, "2.1", "height", (8, 4), frames=2, dtype=torch.float32)
        half, x = build(way, case.kind, case.dtype, True), inputs(case)
        shared = ADAPTERS[way](half, case.axis, group)
        share = least_peak_of(lambda: shared(x))  # noqa: B023
        result[way] = share, peak_of(lambda: half(x))  # noqa: B023
    return result


def common_chunks(group: Any) -> tuple[list[int], float]:
    """Frames of each part where the limit of 2^31 elements, made small, allows a shorter band longer chunks."""
    case = Case("decode", "2.1", "width", (2, 3), frames=3, chunk=None)
    half, x = build(case.way, case.kind, case.dtype, True), inputs(case)
    whole = half(x)
    shared = HaloDecoder(half, "width", group, to_first_only=False)
    limit = vae_levels.INT32_ELEMENTS
    vae_levels.INT32_ELEMENTS = largest_decoder_tensor(half.config, 2, 2, 1) + 1
    assert most_decoder_frames(half.config, (1, 16, 3, 2, 2)) == 1
    assert most_decoder_frames(half.config, (1, 16, 3, 2, 1)) == 2
    parts = list(shared.decode(x, None))
    vae_levels.INT32_ELEMENTS = limit
    return [part.shape[2] for part in parts], relative_error(torch.cat(parts, 2), whole)


REFUSED = [
    (Case("decode", "2.1", "height", (1, 4)), "1 lines make 1 bands of at least 1, fewer than the 2 ranks"),
    (Case("encode", "2.1", "width", (4, 1)), "1 lines make 1 bands of at least 1, fewer than the 2 ranks"),
    (Case("decode", "2.1", "height", (2, 2), chunk=0), "chunk=0 latent frames is none"),
    (
        Case("decode", "2.1", "depth", (2, 2)),
        "axis='depth' is no axis that a VAE is cut along: use height, width or auto",
    ),
]


def refusal(case: Case, group: Any) -> str:
    try:
        error(case, group)
    except ValueError as refused:
        return str(refused)
    return ""


def test_the_decoder_stays_what_it_is() -> None:
    for seams in found_by(2, "seams"):
        assert seams["type"] == "HaloDecoder"
        assert seams["again"], "a second call of one adapter gave something else"
        assert seams["replaced"] == 0
        assert seams["weights"], "weights were copied"
        assert seams["whole"], "the decoder by itself gives something else afterwards"


def test_no_line_is_sent_twice() -> None:
    for chunks in found_by(2, "exchanges"):
        counts, elements = zip(*chunks, strict=True)
        assert counts == (33, 33, 33)  # the convolutions with a border, and no more for the frames of earlier chunks
        assert elements[0] < elements[1] == elements[2] == _later_elements(width=1)


def _later_elements(width: int) -> int:
    """Elements of one line with its corners through all convolutions, in a chunk of one latent frame."""
    config, total, frames = CONFIGS["2.1"], 0, 1
    levels = decoder_levels(config)
    total += (config.z_dim + 4 * levels[0].in_channels) * (width + 2)
    for level in levels:
        convs = 2 * (config.num_res_blocks + 1)
        total += (level.in_channels + (convs - 1) * level.channels) * frames * (width + 2)
        frames, width = frames * level.time, width * level.space
        if level.space > 1:
            total += level.channels * frames * (width + 2)
    return total + levels[-1].channels * frames * (width + 2)


def test_activations_stay_channels_last() -> None:
    assert found_by(2, "row major") == [[], []]


@pytest.mark.parametrize("way", ADAPTERS)
def test_a_rank_needs_half_the_memory(way: str) -> None:
    for peaks in found_by(2, "peaks"):
        share, whole = peaks[way]
        assert share < 0.57 * whole  # lines of the neighbours, and the whole frames on the first


def test_all_ranks_take_the_chunks_of_the_longest_band() -> None:
    for frames, error in found_by(2, "chunks"):
        assert frames == [1, 4, 4]
        assert error <= 1e-12


def test_refuses_on_every_rank_alike() -> None:
    for refused in found_by(2, "refused"):
        for told, (_, expected) in zip(refused, REFUSED, strict=True):
            assert expected in told


def test_knows_its_vaes() -> None:
    decoder = VideoDecoder(CONFIGS["2.1"])
    assert from_vae(decoder, "auto", None) is decoder
    with pytest.raises(
        ValueError, match=r"torch.nn.modules.linear.Identity .* one of .*vgen.models.wan.vae.VideoDecoder"
    ):
        from_vae(nn.Identity(), "auto", dist.GroupMember.NON_GROUP_MEMBER)
