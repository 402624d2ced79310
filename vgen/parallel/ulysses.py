"""Ulysses sequence parallelism: a rank computes its part of the video's tokens, and of the heads where tokens meet.

The tokens of the video are dealt out contiguously where the transformer is entered, and its velocity is gathered where
it is left. In between all is local but two kinds of attention, named by the plan:

- of the video to itself: one all-to-all hands queries, keys and values of all heads of some tokens over for those of
  all tokens of some heads, one more takes the result back;
- of another stream to the video: that stream is whole on every rank, so a rank takes its heads of the queries, one
  all-to-all gives it those heads of all keys and values, and an all-gather joins the results. A rank receives
  2 S / P + A rows of N H values; gathering all heads of all keys and values instead would be 2 S rows.

Where the number of tokens does not divide, the last ones are repeated: rows that are computed with, never attended to,
and cut off at the end. A repeated token, unlike zeros, changes no maximum that a quantized layer takes of its input.

Shapes: B batch, P ranks, S video tokens, s = ceil(S / P) tokens of one rank, A tokens of the other stream, N heads, n =
N / P heads of one rank, H head dim.
"""

import dataclasses
import inspect
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vgen.models.attention import Attend, Rope
from vgen.models.plan import AttentionPlan, Plan
from vgen.models.stream import check_tokens
from vgen.parallel.collectives import gather, heads_for_tokens, tokens_for_heads


def apply_ulysses(transformer: nn.Module, plan: Plan, group: dist.ProcessGroup | None) -> None:
    """Spread the video tokens of ``transformer`` over the ranks of ``group``, in place; None changes nothing.

    Afterwards every rank of the group calls the transformer as before, with equal and complete inputs, and gets the
    complete result. Its attentions are wrapped as they are: give them their kernels first.

    Raises:
        ValueError: the ranks do not divide the heads.
    """
    if group is None:
        return
    ulysses = _Ulysses(plan, inspect.signature(transformer.forward), group)

    # One object per kernel: a compiler that guards on it compiles one block for all.
    @cache
    def wrapped(kind: AttentionPlan, attend: Attend) -> Attend:
        return partial(ulysses.attend_self if kind.queries == "video" else ulysses.attend_video, attend)

    reading = [attention for attention in plan.attentions if attention.keys == "video"]
    for block in transformer.get_submodule(plan.blocks).children():
        for attention in reading:
            module = block.get_submodule(attention.name)
            _check_heads(getattr(module, plan.num_heads), group.size())
            module.attend = wrapped(attention, module.attend)  # type: ignore[assignment]
    transformer.register_forward_pre_hook(ulysses.split, with_kwargs=True)
    transformer.register_forward_hook(ulysses.join)


def _check_heads(num_heads: int, ranks: int) -> None:
    if num_heads % ranks:
        legal = ", ".join(str(size) for size in range(1, num_heads + 1) if num_heads % size == 0)
        raise ValueError(
            f"ulysses_size={ranks} does not divide the {num_heads} heads of this model; use one of {legal}"
        )


class _Ulysses:
    """What the hooks and attentions of one transformer share. ``tokens``: S of the forward at hand, 0 without video."""

    def __init__(self, plan: Plan, signature: inspect.Signature, group: dist.ProcessGroup) -> None:
        self.plan = plan
        self.signature = signature
        self.group = group
        self.tokens = 0

    def split(self, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any] | None:
        """The arguments of ``forward`` with this rank's part of the video's tokens."""
        bound = self.signature.bind(*args, **kwargs)
        stream, rope, plan = bound.arguments[self.plan.stream], bound.arguments["rope"], self.plan
        self.tokens = 0 if stream is None else stream.latents.shape[plan.stream_token_dim]
        if stream is None:
            return None
        tables: dict[str, Rope] = {name: getattr(rope, name) for name in plan.stream_ropes} or {"": rope}
        for table in tables.values():
            check_tokens("video", stream.latents, stream.timestep, stream.rows, table)
        timestep, rows = stream.timestep, stream.rows
        if rows is not None:
            rows = self._part(rows, plan.rows_token_dim)
        elif timestep.ndim > plan.timestep_token_dim:
            timestep = self._part(timestep, plan.timestep_token_dim)
        latents = self._part(stream.latents, plan.stream_token_dim)
        bound.arguments[plan.stream] = dataclasses.replace(stream, latents=latents, timestep=timestep, rows=rows)
        parts = {name: self._part_of_rope(table) for name, table in tables.items()}
        bound.arguments["rope"] = dataclasses.replace(rope, **parts) if plan.stream_ropes else parts[""]
        return bound.args, bound.kwargs

    def join(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        """What ``forward`` returns, the video's velocity with all of its tokens."""
        if not self.tokens:
            return output
        velocity, *others = output if isinstance(output, tuple) else (output,)
        dim = self.plan.stream_token_dim
        velocity = gather(velocity, dim, self.group, "ulysses: velocity").narrow(dim, 0, self.tokens)
        return (velocity, *others) if isinstance(output, tuple) else velocity

    def attend_self(
        self, attend: Attend, q_BNsH: Tensor, k_BNsH: Tensor, v_BNsH: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """The video's tokens attend to each other. Returns [B, N, s, H]."""
        _refuse_mask(mask)
        q_BnSH, k_BnSH, v_BnSH = heads_for_tokens(
            (q_BNsH, k_BNsH, v_BNsH), self.group, "ulysses: queries, keys and values"
        )
        out_BnSH = attend(q_BnSH, *self._true(k_BnSH, v_BnSH), None)
        return tokens_for_heads(out_BnSH, self.group, "ulysses: attention")

    def attend_video(
        self, attend: Attend, q_BNAH: Tensor, k_BNsH: Tensor, v_BNsH: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """A stream that is whole on every rank attends to the video's tokens. Returns [B, N, A, H]."""
        _refuse_mask(mask)
        k_BnSH, v_BnSH = heads_for_tokens((k_BNsH, v_BNsH), self.group, "ulysses: keys and values")
        q_BnAH = q_BNAH.chunk(self.group.size(), dim=1)[self.group.rank()]
        out_BnAH = attend(q_BnAH, *self._true(k_BnSH, v_BnSH), None)
        return gather(out_BnAH.transpose(1, 2), 2, self.group, "ulysses: cross-attention").transpose(1, 2)

    def _true(self, k_BnSH: Tensor, v_BnSH: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values without those of repeated tokens."""
        return k_BnSH[:, :, : self.tokens], v_BnSH[:, :, : self.tokens]

    def _part(self, x: Tensor, dim: int) -> Tensor:
        """This rank's tokens along ``dim``, filled up with the last one of all."""
        length = -(-self.tokens // self.group.size())
        start = min(self.group.rank() * length, self.tokens)
        part = x.narrow(dim, start, min(length, self.tokens - start))
        missing = length - part.shape[dim]
        if not missing:
            return part
        last = x.narrow(dim, self.tokens - 1, 1)
        return torch.cat([part, last.expand(*(missing if i == dim else -1 for i in range(x.ndim)))], dim)

    def _part_of_rope(self, rope: Rope) -> Rope:
        cos, sin = rope
        return self._part(cos, self.plan.rope_token_dim), self._part(sin, self.plan.rope_token_dim)


def _refuse_mask(mask: Tensor | None) -> None:
    if mask is not None:
        raise ValueError(
            f"an attention that is spread over ranks got a mask of {tuple(mask.shape)}, which would be of one rank's "
            f"tokens only; use ulysses_size=1 where tokens are masked"
        )
