"""What every transformer asks of a stream of tokens before it computes.

Shapes: B batch, T tokens, R distinct timesteps.
"""

from torch import Tensor

from vgen.models.attention import Rope


def check_tokens(stream: str, latents: Tensor, timestep: Tensor, rows: Tensor | None, rope: Rope) -> None:
    """``latents`` [B, T, C] against its timesteps, [B], [B, T] or [B, R] with ``rows`` [B, T], and position tables.

    Raises:
        ValueError: the numbers of tokens or timesteps do not fit; ``stream`` is what the sentence calls it.
    """
    (batch, tokens), table_tokens = latents.shape[:2], rope[0].shape[2]
    if tokens != table_tokens:
        raise ValueError(
            f"the {stream} has {tokens} tokens and the position tables {table_tokens}; "
            f"build the tables from the geometry of these latents"
        )
    shape = tuple(timestep.shape)
    if rows is None:
        fits = shape in ((batch,), (batch, tokens))
    else:
        fits = len(shape) == 2 and shape[0] == batch and tuple(rows.shape) == (batch, tokens)
    if not fits:
        given = "without rows" if rows is None else f"with rows {tuple(rows.shape)}"
        raise ValueError(
            f"the {stream} has {batch} x {tokens} tokens and timesteps {shape} {given}; "
            f"give one timestep per sample, or one per token, or the distinct ones of each sample with rows per token"
        )
