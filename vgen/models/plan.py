"""What transforms must know about a transformer, as data: names, token dims, quantizable layers."""

from dataclasses import dataclass
from typing import Literal

Tokens = Literal["video", "audio", "text"]


@dataclass(frozen=True)
class AttentionPlan:
    """One attention of a block: its name there, whose tokens ask, whose tokens are read."""

    name: str
    queries: Tokens
    keys: Tokens


@dataclass(frozen=True)
class Plan:
    """``stream``: the argument of ``forward`` that has the video's tokens. ``stream_ropes``: attributes of its argument
    ``rope`` that are tables of these tokens; none where ``rope`` is such a table itself.

    ``blocks``: name of the list of blocks. ``attentions``: every attention of a block, each with ``attend``.

    ``num_heads``: name of the attentions' attribute holding the number of heads. ``*_token_dim``: the dim that counts
    tokens, in latents, context and velocities, in a per-token timestep, in the rows that give tokens their timestep,
    and in a position table.
    ``quantizable``: ends of the names, inside a block, of the Linears that published quantized checkpoints quantize:
    all but the gates of 2.3's attentions, which have one output per head.
    """

    stream: str
    stream_ropes: tuple[str, ...]
    blocks: str
    attentions: tuple[AttentionPlan, ...]
    num_heads: str
    stream_token_dim: int
    timestep_token_dim: int
    rows_token_dim: int
    rope_token_dim: int
    quantizable: tuple[str, ...]
