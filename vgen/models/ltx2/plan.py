"""What transforms must know about the LTX-2 transformer, as data: names, token dims, quantizable layers."""

from vgen.models.plan import AttentionPlan, Plan

PLAN = Plan(
    stream="video",
    stream_ropes=("video", "video_cross"),
    blocks="transformer_blocks",
    attentions=(
        AttentionPlan("attn1", queries="video", keys="video"),
        AttentionPlan("attn2", queries="video", keys="text"),
        AttentionPlan("audio_attn1", queries="audio", keys="audio"),
        AttentionPlan("audio_attn2", queries="audio", keys="text"),
        AttentionPlan("audio_to_video_attn", queries="video", keys="audio"),
        AttentionPlan("video_to_audio_attn", queries="audio", keys="video"),
    ),
    num_heads="num_heads",
    stream_token_dim=1,
    timestep_token_dim=1,
    rows_token_dim=1,
    rope_token_dim=2,
    quantizable=(".to_q", ".to_k", ".to_v", ".to_out.0", ".net.0.proj", ".net.2"),
)
