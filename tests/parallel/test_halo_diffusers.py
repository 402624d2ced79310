"""diffusers' VAEs over ranks against the same VAE alone: values, what is sent, memory, and the way back."""

import copy
import importlib
import itertools
import random
import sys
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from diffusers.models.autoencoders.autoencoder_kl_wan import WanUpsample
from torch import Tensor, nn

from tests.ranks import run_ranks
from vgen.components.wan_diffusers_vae import DiffusersVideoDecoder, DiffusersVideoEncoder
from vgen.models.wan.config import VAE_2_1, VAE_2_2
from vgen.models.wan.vae_blocks import apply_channels_last
from vgen.models.wan.vae_levels import decoder_levels
from vgen.parallel import halo_diffusers, halo_wan
from vgen.parallel.halo import Axis
from vgen.parallel.halo_diffusers import HaloDecoder, HaloEncoder
from vgen.parallel.vae import ADAPTERS, from_vae, qualified_name

CONFIGS = {"2.1": replace(VAE_2_1, base_dim=8), "2.2": replace(VAE_2_2, base_dim=8, decoder_base_dim=8)}
"""Not 4 wide: a norm over 4 channels magnifies fp32 rounding, and a VAE alone is 1.3e-6 off its own fp64 result."""
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-6}
"""Measured: 1.5e-15 and 6.3e-7."""
HALVES = {"decode": (DiffusersVideoDecoder, HaloDecoder), "encode": (DiffusersVideoEncoder, HaloEncoder)}


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
    """Random weights that keep activations near 1, gains away from 1, and frames where diffusers does not clamp."""
    generator = torch.Generator().manual_seed(1)
    half: nn.Module = HALVES[way][0](CONFIGS[kind])
    for name, tensor in half.named_parameters():
        if name.endswith("gamma"):
            tensor.data = 0.5 + torch.rand(tensor.shape, generator=generator)
        else:
            fan_in = tensor[0].numel() if tensor.ndim > 1 else 4
            tensor.data = torch.randn(tensor.shape, generator=generator) / fan_in**0.5
        if name.startswith("decoder.conv_out"):
            tensor.data *= 0.05
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
    shared = from_vae(half, case.axis, group, to_first_only=case.to_first_only)
    assert type(shared) is HALVES[case.way][1]
    got = shared(x, case.chunk)
    if got is None:
        return None
    expected = half(x, case.chunk)
    assert case.way == "encode" or expected.abs().max() < 1
    return relative_error(got, expected)


def drawn_cases(ranks: int) -> list[Case]:
    """At an uneven cut both ways, VAEs and axes, and one of each way and VAE with all else drawn by a fixed seed.

    The first three chunks differ, in what diffusers keeps: two ranks are enough to see that. Of 3 and 4 ranks each VAE
    has one axis at each, for time.
    """
    draw = random.Random(ranks)
    cases = []
    for way, kind in itertools.product(HALVES, CONFIGS):
        by_height = Case(way, kind, "height", (ranks + 1, 1), frames=3 if ranks == 2 else 2)
        by_width = Case(way, kind, "width", (1, ranks + 1), frames=2)
        if ranks == 2:
            cases += [by_height, by_width]
        else:
            cases.append(by_height if (kind == "2.1") == (ranks == 3) else by_width)
        size = [draw.randint(ranks, 2 * ranks), draw.randint(1, 3)]
        axis = draw.choice(list[Axis](["height", "width", "auto"]))
        cases.append(
            Case(
                way,
                kind,
                axis,
                tuple(size if axis == "height" else size[::-1]),
                frames=draw.choice([1, 2, 3]),
                chunk=draw.choice([1, None]),
                batch=draw.choice([1, 2]),
                dtype=torch.float32,
                channels_last=draw.random() < 0.5,
                to_first_only=draw.random() < 0.5,
            )
        )
    return cases


CASES = {ranks: drawn_cases(ranks) for ranks in (2, 3, 4)}
GROUPS = {2: [1, 3], 3: [0, 2, 3], 4: [0, 1, 2, 3]}
"""Ranks of the world: a group's own numbers are no address for its neighbours."""


@cache
def results() -> list[dict[str, Any]]:
    """By rank of the world what each of its groups found: all tests share one start of 4 processes."""
    return run_ranks(4, examine)


def examine() -> dict[str, Any]:
    # diffusers rounds to fp32 here, where the last bit of an fp64 sum can decide which way; of fp32 nothing changes.
    WanUpsample.forward = nn.Upsample.forward
    # New tensors are full of NaN: what nobody wrote is seen.
    torch.use_deterministic_algorithms(True, warn_only=True)
    groups = {size: dist.new_group(ranks) for size, ranks in GROUPS.items()}
    found: dict[str, Any] = {}
    for size, group in groups.items():
        if dist.get_rank() in GROUPS[size]:
            found[f"errors of {size}"] = [error(case, group) for case in CASES[size]]
    if dist.get_rank() in GROUPS[2]:
        found["way back"] = [way_back(way, groups[2]) for way in HALVES]
        found["failure"] = failure(groups[2])
        found["exchanges"] = exchanges(groups[2])
        found["peaks"] = peaks(groups[2])
        found["refused"] = [refusal(case, groups[2]) for case, _ in REFUSED]
    return found


def found_by(ranks: int, what: str) -> list[Any]:
    return [results()[rank][what] for rank in GROUPS[ranks]]


@pytest.mark.parametrize("ranks", CASES)
def test_any_cut_gives_the_whole(ranks: int) -> None:
    by_case = zip(*found_by(ranks, f"errors of {ranks}"), strict=True)
    for case, by_rank in zip(CASES[ranks], by_case, strict=True):
        receivers = 1 if case.to_first_only else ranks
        assert [found is None for found in by_rank] == [False] * receivers + [True] * (ranks - receivers), case
        assert all(found <= BOUNDS[case.dtype] for found in by_rank[:receivers]), (case, by_rank)


def attributes(half: nn.Module) -> list[dict[str, Any]]:
    """What every module has by itself, but for tensors, children and hooks."""
    return [{k: v for k, v in vars(module).items() if not k.startswith("_")} for module in half.modules()]


def way_back(way: str, group: Any) -> dict[str, bool]:
    case = Case(way, "2.2", "height", (3, 1), frames=2, channels_last=False)
    half, x = build(case.way, case.kind, case.dtype, case.channels_last), inputs(case)
    before, whole = attributes(half), half(x)
    state = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in half.state_dict().items()}
    shared = from_vae(half, "auto", group, to_first_only=False)
    first, again = shared(x), shared(x)
    return {
        "attributes": attributes(half) == before,
        "weights": all(
            tensor.data_ptr() == state[name][0] and torch.equal(tensor, state[name][1])
            for name, tensor in half.state_dict().items()
        ),
        "whole": torch.equal(half(x), whole),
        "again": torch.equal(first, again),
    }


def failure(group: Any) -> bool:
    """Whether a decode that fails half way leaves the decoder what it was; it fails on all ranks."""
    case = Case("decode", "2.1", "height", (2, 1), frames=1)
    half, x = build(case.way, case.kind, case.dtype, True), inputs(case)
    before, whole = attributes(half), half(x)

    def fail(*_: Any) -> None:
        raise MemoryError

    hook = half.decoder.up_blocks[2].register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        HaloDecoder(half, "height", group)(x)
    hook.remove()
    return attributes(half) == before and torch.equal(half(x), whole)


def exchanges(group: Any) -> list[int]:
    """How many elements went to the next rank at each swap of lines."""
    case = Case("decode", "2.1", "height", (2, 1), frames=3)
    sent: list[int] = []
    exchange_lines = halo_wan.exchange_lines

    def counted(first: Tensor | None, last: Tensor | None, group: Any) -> Any:
        sent.append(0 if last is None else last.numel())
        return exchange_lines(first, last, group)

    halo_wan.exchange_lines = counted
    HaloDecoder(build(case.way, case.kind, case.dtype, True), "height", group)(inputs(case))
    halo_wan.exchange_lines = exchange_lines
    return sent


def peaks(group: Any) -> dict[str, tuple[int, int]]:
    """Bytes alive at once in one rank's share and in the whole."""
    from tests.test_memory import least_peak_of, peak_of

    result = {}
    for way in HALVES:
        case = Case(way, "2.1", "height", (8, 2), frames=2, dtype=torch.float32)
        half, x = build(way, case.kind, case.dtype, True), inputs(case)
        shared = from_vae(half, case.axis, group, to_first_only=True)
        share = least_peak_of(lambda: shared(x))  # noqa: B023
        result[way] = share, peak_of(lambda: half(x))  # noqa: B023
    return result


REFUSED = [
    (Case("decode", "2.1", "height", (1, 4)), "1 lines make 1 bands of at least 1, fewer than the 2 ranks"),
    (Case("encode", "2.1", "width", (4, 1)), "1 lines make 1 bands of at least 1, fewer than the 2 ranks"),
    (Case("decode", "2.1", "height", (2, 2), chunk=2), "chunk=2, but diffusers' VAE works one latent frame at a time"),
    (Case("encode", "2.1", "height", (2, 2), chunk=2), "chunk=2, but diffusers' VAE works one latent frame at a time"),
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


def test_the_vae_stays_what_it_is() -> None:
    for way_back in itertools.chain(*found_by(2, "way back")):
        assert way_back == {"attributes": True, "weights": True, "whole": True, "again": True}


def test_a_failed_decode_leaves_the_decoder_as_it_was() -> None:
    assert found_by(2, "failure") == [True, True]


def test_no_line_is_sent_twice() -> None:
    for sent in found_by(2, "exchanges"):
        counts = [len(sent[:33]), len(sent[33:66]), len(sent[66:])]
        elements = [sum(sent[:33]), sum(sent[33:66]), sum(sent[66:])]
        assert counts == [33, 33, 33]  # the convolutions with a border, and no more for the frames of earlier chunks
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


@pytest.mark.parametrize("way", HALVES)
def test_a_rank_needs_half_the_memory(way: str) -> None:
    for peaks in found_by(2, "peaks"):
        share, whole = peaks[way]
        assert share < 0.6 * whole, (share, whole)


def test_refuses_on_every_rank_alike() -> None:
    for refused in found_by(2, "refused"):
        for told, (_, expected) in zip(refused, REFUSED, strict=True):
            assert expected in told


def test_refuses_an_attention_that_it_cannot_share() -> None:
    block = copy.deepcopy(build("decode", "2.1", torch.float32, False).decoder.mid_block.attentions[0])
    x = torch.randn(1, block.dim, 1, 2, 3)
    calls: list[Tensor] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        calls.append(q)
        return v

    gathered = halo_diffusers._gathering_forward(block.forward, attend)
    assert gathered(x).shape == x.shape
    assert [q.shape[2] for q in calls] == [6]
    with pytest.raises(RuntimeError, match="called scaled_dot_product_attention 0 times, but one call is"):
        halo_diffusers._gathering_forward(lambda x: x, attend)(x)


def test_the_registry_names_what_is_there() -> None:
    for half, _ in HALVES.values():
        assert qualified_name(half) in ADAPTERS
    decoder = build("decode", "2.1", torch.float32, False)
    assert from_vae(decoder, "auto", None) is decoder


def test_other_vaes_need_no_diffusers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process that cannot import it, which would take seconds to start."""
    for name in [name for name in sys.modules if name.startswith(("vgen", "diffusers"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "diffusers", None)
    assert importlib.import_module("vgen.parallel.vae").ADAPTERS.keys() == ADAPTERS.keys()
    with pytest.raises(ImportError):
        importlib.import_module("vgen.parallel.halo_diffusers")
