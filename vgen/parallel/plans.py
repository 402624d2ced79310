"""Parallel plans as numbers: which are legal for a model and a request, why not, and which come nearest; torch-free.

A rank has its place in the order data, cfg, ulysses, the last one fastest. A replica denoises and decodes one prompt at
a time; its first ``vae_size`` ranks decode. Every rank and the Hydra parent compute the same answers from the same
numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import product
from typing import Literal

SIZES = ("data_size", "cfg_size", "ulysses_size", "vae_size")


@dataclass(frozen=True)
class ParallelPlan:
    """How many ways each thing is spread: prompts, guidance passes, tokens of a pass, frames of the VAE."""

    data_size: int = 1
    cfg_size: int = 1
    ulysses_size: int = 1
    vae_size: int = 1

    @property
    def denoise_size(self) -> int:
        """Ranks of a replica that denoise."""
        return self.cfg_size * self.ulysses_size

    @property
    def world_size(self) -> int:
        return max(self.data_size * self.denoise_size, self.vae_size)

    @property
    def replica_size(self) -> int:
        """Ranks of a replica, those that only decode included; of a plan without ``layout_reasons``."""
        return self.world_size // self.data_size


@dataclass(frozen=True)
class Limits:
    """What one model and its requests can be spread over.

    ``heads``: of each attention that Ulysses splits, by name. ``video_tokens``: of the shortest request; they need not
    divide, Ulysses pads them. ``passes``: of a step, of the request with the fewest. ``halo_axis``: along which ranks
    decode bands of ``latent_height`` x ``latent_width`` latents; None where the decode is spread by tiles, of which a
    rank may have none.
    """

    model: str
    heads: Mapping[str, int]
    video_tokens: int
    passes: tuple[str, ...]
    latent_height: int
    latent_width: int
    halo_axis: Literal["height", "width"] | None = None
    prompts: int = 1


def layout_reasons(plan: ParallelPlan) -> tuple[str, ...]:
    """Why ``plan`` is no layout of ranks at all, one sentence each; empty if it is one."""
    sentences = [
        f"parallel.{name}={getattr(plan, name)} is not a number of ranks; give 1 or more"
        for name in SIZES
        if getattr(plan, name) < 1
    ]
    if not sentences and plan.data_size > 1 and plan.vae_size > plan.denoise_size:
        sentences.append(
            f"parallel.vae_size={plan.vae_size} is above the {plan.denoise_size} rank(s) of each of the "
            f"{plan.data_size} replicas (cfg_size x ulysses_size); use {plan.denoise_size}, or parallel.data_size=1"
        )
    return tuple(sentences)


def reasons(plan: ParallelPlan, limits: Limits) -> tuple[str, ...]:
    """Why ``plan`` cannot run within ``limits``: one sentence each with value, rule and the nearest legal values.

    Empty if it can.
    """
    sentences = layout_reasons(plan)
    if sentences:
        return sentences
    legal = _legal_sizes(limits, plan.world_size)
    return tuple(
        f"parallel.{name}={size} {_rule(name, size, limits)}; use {_around(size, legal[name])}"
        + (_same_ranks(plan, legal) if name in ("cfg_size", "ulysses_size") else "")
        for name, size in ((name, getattr(plan, name)) for name in SIZES)
        if size not in legal[name]
    )


def _legal_sizes(limits: Limits, num_ranks: int) -> dict[str, Sequence[int]]:
    """The sizes of each kind that are legal by themselves, ascending; ``num_ranks`` bounds a VAE without halo."""
    heads = math.gcd(*limits.heads.values())
    lines = _halo_lines(limits)
    return {
        "data_size": range(1, limits.prompts + 1),
        "cfg_size": range(1, len(limits.passes) + 1),
        "ulysses_size": [size for size in range(1, min(heads, limits.video_tokens) + 1) if heads % size == 0],
        "vae_size": range(1, (num_ranks if lines is None else lines) + 1),
    }


def _halo_lines(limits: Limits) -> int | None:
    if limits.halo_axis is None:
        return None
    return limits.latent_height if limits.halo_axis == "height" else limits.latent_width


def _rule(name: str, size: int, limits: Limits) -> str:
    """What ``size`` breaks, as the middle of a sentence."""
    if name == "data_size":
        return f"is above the number of prompts ({limits.prompts})"
    if name == "cfg_size":
        return f"is above the number of passes of a step ({len(limits.passes)}: {', '.join(limits.passes)})"
    if name == "vae_size":
        axis, sizes = limits.halo_axis, f"{limits.latent_height} x {limits.latent_width}"
        return f"is above the {_halo_lines(limits)} lines along {axis} of {sizes} latents, which are split by lines"
    broken = [f"the {heads} heads of {attention}" for attention, heads in limits.heads.items() if heads % size]
    if broken:
        return f"does not divide {' and '.join(broken)} in {limits.model}"
    return f"is above the number of video tokens ({limits.video_tokens})"


def _around(size: int, legal: Sequence[int]) -> str:
    below = [one for one in legal if one < size][-1:]
    above = [one for one in legal if one > size][:1]
    return " or ".join(map(str, below + above))


def _same_ranks(plan: ParallelPlan, legal: Mapping[str, Sequence[int]]) -> str:
    """How as many ranks could denoise, with the same ``data_size`` if that can be, as the end of a sentence."""
    ranks = plan.data_size * plan.denoise_size
    ways = [way for way in _denoise_sizes(legal) if math.prod(way) == ranks]
    same_data = [way for way in ways if way[0] == plan.data_size]
    texts = [
        ("" if data == plan.data_size else f"data_size={data}, ") + f"cfg_size={cfg} and ulysses_size={ulysses}"
        for data, cfg, ulysses in same_data or ways
    ]
    return f", or for {ranks} ranks {' or '.join(texts)}" if texts else ""


def _denoise_sizes(legal: Mapping[str, Sequence[int]]) -> Iterator[tuple[int, int, int]]:
    return product(legal["data_size"], reversed(legal["cfg_size"]), legal["ulysses_size"])


def legal_plans(num_ranks: int, limits: Limits) -> tuple[ParallelPlan, ...]:
    """All plans of exactly ``num_ranks`` ranks that can run within ``limits``.

    Those with most ranks denoising come first, then those with most decoding, with fewest replicas, with most for CFG.
    """
    legal = _legal_sizes(limits, num_ranks)
    plans = []
    for data, cfg, ulysses in _denoise_sizes(legal):
        sizes: Sequence[int] = ()
        if data * cfg * ulysses == num_ranks:
            sizes = range(1, cfg * ulysses + 1)
        elif data == 1 and cfg * ulysses < num_ranks:
            sizes = (num_ranks,)
        plans += [ParallelPlan(data, cfg, ulysses, size) for size in sizes if size in legal["vae_size"]]
    return tuple(
        sorted(plans, key=lambda one: (-one.data_size * one.denoise_size, -one.vae_size, one.data_size, -one.cfg_size))
    )


def nearest(plan: ParallelPlan, limits: Limits) -> ParallelPlan:
    """The legal plan nearest to ``plan``: of as many ranks, or else of as many fewer as it takes.

    Of those, one in which about as many ranks denoise, then the one whose sizes differ by the smallest factors; of
    several, the first of ``legal_plans``. A plan of one rank is always legal.
    """
    plan = ParallelPlan(*(max(1, size) for size in astuple(plan)))
    if not reasons(plan, limits):
        return plan
    for num_ranks in range(plan.world_size, 1, -1):
        plans = legal_plans(num_ranks, limits)
        if plans:
            return min(plans, key=lambda one: _distance(astuple(plan), astuple(one)))
    return ParallelPlan()


def _distance(one: Sequence[int], other: Sequence[int]) -> tuple[float, float]:
    """How many times the ranks that denoise, and the sizes in sum, double or halve; rounded, so that ties are ties."""
    factors = [abs(math.log2(a / b)) for a, b in zip(one, other, strict=True)]
    ranks = abs(math.log2(math.prod(one[:3]) / math.prod(other[:3])))
    return round(ranks, 9), round(sum(factors), 9)


def settle(plan: ParallelPlan, passes: int) -> ParallelPlan:
    """``plan`` for requests of ``passes`` passes: with a single one, the ranks of CFG split its tokens instead.

    For plans named by their number of ranks (``pvsN``). One that asks for a ``cfg_size`` itself is refused by
    ``reasons`` rather than changed.
    """
    return replace(plan, cfg_size=1, ulysses_size=plan.denoise_size) if passes == 1 else plan
