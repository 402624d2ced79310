"""What transforms must know about the Wan transformer, as data: names, token dims, which layers and dtypes change."""

from vgen.models.plan import AttentionPlan, Plan
from vgen.models.wan.config import Residual

PLAN = Plan(
    stream="stream",
    stream_ropes=(),
    blocks="blocks",
    attentions=(
        AttentionPlan("attn1", queries="video", keys="video"),
        AttentionPlan("attn2", queries="video", keys="text"),
    ),
    num_heads="num_heads",
    stream_token_dim=1,
    timestep_token_dim=1,
    rows_token_dim=1,
    rope_token_dim=2,
    quantizable=(".to_q", ".to_k", ".to_v", ".to_out.0", ".add_k_proj", ".add_v_proj", ".net.0.proj", ".net.2"),
)

_FLOAT32_IN_BOTH = frozenset({"time_embedder", "scale_shift_table", "norm1", "norm2"})
_FLOAT32: dict[Residual, frozenset[str]] = {
    "fp32": _FLOAT32_IN_BOTH | {"time_proj", "norm_q", "norm_k", "norm_added_k", "pos_embed", "proj_out"},
    "model": _FLOAT32_IN_BOTH,
}


def keeps_float32(name: str, residual: Residual) -> bool:
    """Whether the parameter ``name`` stays fp32 where the model is of a smaller dtype.

    The module computes in the dtypes of its parameters: this is where the two codes' islands are.
    """
    return not _FLOAT32[residual].isdisjoint(name.split("."))
