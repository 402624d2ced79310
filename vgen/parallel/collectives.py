"""Exchanges of tokens and heads between the ranks of one group, for inference: no gradient passes through.

Every rank of the group calls the same function with equal shapes. Each call is one collective on one packed buffer,
and waits for nothing on the host, so it may be captured in a CUDA graph. ``name``: what a failure calls it.

Shapes: P ranks, B batch, s tokens of one rank, S = P * s all tokens, N heads, n = N / P heads of one rank, H head dim,
m tensors in one message.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from vgen.parallel.watch import collective

# Newer torch warns of the older name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def heads_for_tokens(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, name: str = "heads for tokens"
) -> tuple[Tensor, ...]:
    """Give away tokens' heads for heads' tokens: each of ``tensors`` [B, N, s, H] becomes [B, n, S, H], in one message.

    Heads and tokens are dealt out contiguously by rank. The results are views of one buffer [B, S, m, n, H]: with one
    sample it is the message as it came, with more it is copied once.
    """
    ranks = group.size()
    sent_PBsmnH = torch.stack(
        [x.transpose(1, 2).unflatten(2, (ranks, -1)).movedim(2, 0) for x in tensors],
        dim=3,
    )
    received_PBsmnH = _all_to_all(sent_PBsmnH, group, name)
    whole_BSmnH = received_PBsmnH.movedim(0, 1).flatten(1, 2)
    return tuple(x.transpose(1, 2) for x in whole_BSmnH.unbind(2))


def tokens_for_heads(x_BnSH: Tensor, group: dist.ProcessGroup, name: str = "tokens for heads") -> Tensor:
    """The way back: [B, n, S, H] becomes [B, N, s, H], a view of a new buffer [B, s, N, H]."""
    sent_PBsnH = x_BnSH.transpose(1, 2).unflatten(1, (group.size(), -1)).movedim(1, 0).contiguous()
    received_PBsnH = _all_to_all(sent_PBsnH, group, name)
    return received_PBsnH.movedim(0, 2).flatten(2, 3).transpose(1, 2)


def gather(x: Tensor, dim: int, group: dist.ProcessGroup, name: str = "gather") -> Tensor:
    """The tensors of all ranks one after the other along ``dim``, on every rank."""
    ranks, first = group.size(), x.shape[0]
    gathered = x.new_empty((ranks * first, *x.shape[1:]))
    with collective(name, group):
        _all_gather(gathered, x.contiguous(), group=group)
    return gathered.unflatten(0, (ranks, first)).movedim(0, dim).flatten(dim, dim + 1)


def _all_to_all(sent: Tensor, group: dist.ProcessGroup, name: str) -> Tensor:
    """Slice i of dim 0 goes to rank i; slice i of the result came from there."""
    received = torch.empty_like(sent)
    with collective(name, group):
        dist.all_to_all_single(received, sent, group=group)
    return received
