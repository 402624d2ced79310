"""Records that the families' components share."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionSizes:
    """The largest attention of a run; ``other_head_dims``: of the others that the same kernel has to take."""

    num_heads: int
    head_dim: int
    tokens: int
    other_head_dims: tuple[int, ...] = ()
