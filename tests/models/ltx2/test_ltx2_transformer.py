"""The LTX-2 transformer against diffusers with shared random weights, and where the official code differs from it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import LTX2VideoTransformer3DModel
from torch import Tensor, nn

from vgen.models.attention import Attention
from vgen.models.ltx2.adaln import AdaLayerNorm
from vgen.models.ltx2.config import TransformerConfig
from vgen.models.ltx2.plan import PLAN
from vgen.models.ltx2.rope import Geometry
from vgen.models.ltx2.transformer import LTX2Transformer, Stream

GEOMETRY = Geometry(latent_frames=3, latent_height=2, latent_width=3, fps=24.0, audio_tokens=7)
TEXT_TOKENS = 5
BATCH = 2
TOLERANCE = 2e-6

FULL_SIZE = TransformerConfig(
    num_layers=48,
    num_attention_heads=32,
    attention_head_dim=128,
    audio_attention_head_dim=64,
    in_channels=128,
    out_channels=128,
    audio_in_channels=128,
    audio_out_channels=128,
    caption_channels=3840,
    norm_eps=1e-6,
    rope_theta=10000.0,
    rope_max_pos=(20.0, 2048.0, 2048.0),
    audio_rope_max_pos=20.0,
    rope_float64=True,
    timestep_scale_multiplier=1000,
    av_timestep_scale_multiplier=1000,
)

RENAMED = {
    "proj_in": "patchify_proj",
    "audio_proj_in": "audio_patchify_proj",
    "time_embed": "adaln_single",
    "audio_time_embed": "audio_adaln_single",
    "av_cross_attn_video_scale_shift": "av_ca_video_scale_shift_adaln_single",
    "av_cross_attn_audio_scale_shift": "av_ca_audio_scale_shift_adaln_single",
    "av_cross_attn_video_a2v_gate": "av_ca_a2v_gate_adaln_single",
    "av_cross_attn_audio_v2a_gate": "av_ca_v2a_gate_adaln_single",
    "video_a2v_cross_attn_scale_shift_table": "scale_shift_table_a2v_ca_video",
    "audio_a2v_cross_attn_scale_shift_table": "scale_shift_table_a2v_ca_audio",
    "norm_q": "q_norm",
    "norm_k": "k_norm",
}


def tiny_config(num_heads: int = 2, **changes: Any) -> TransformerConfig:
    tiny = dataclasses.replace(
        FULL_SIZE,
        num_layers=2,
        num_attention_heads=num_heads,
        attention_head_dim=32,
        audio_attention_head_dim=16,
        in_channels=8,
        out_channels=6,
        audio_in_channels=10,
        audio_out_channels=4,
        caption_channels=48,
    )
    return dataclasses.replace(tiny, **changes)


def diffusers_twin(config: TransformerConfig) -> LTX2VideoTransformer3DModel:
    return LTX2VideoTransformer3DModel(
        in_channels=config.in_channels,
        out_channels=config.out_channels,
        num_attention_heads=config.num_attention_heads,
        attention_head_dim=config.attention_head_dim,
        cross_attention_dim=config.width,
        audio_in_channels=config.audio_in_channels,
        audio_out_channels=config.audio_out_channels,
        audio_num_attention_heads=config.num_attention_heads,
        audio_attention_head_dim=config.audio_attention_head_dim,
        audio_cross_attention_dim=config.audio_width,
        num_layers=config.num_layers,
        norm_eps=config.norm_eps,
        caption_channels=config.caption_channels,
        rope_theta=config.rope_theta,
        rope_double_precision=config.rope_float64,
        rope_type="split",
        timestep_scale_multiplier=config.timestep_scale_multiplier,
        cross_attn_timestep_scale_multiplier=config.av_timestep_scale_multiplier,
    ).eval()


def randomise(module: nn.Module, seed: int = 0) -> None:
    """No parameter keeps a value of 0 or 1 that could hide a missing gain, bias or table."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 2 and "table" not in name:
            parameter.data = noise / parameter.shape[1] ** 0.5
        elif "norm" in name:
            parameter.data = 1 + 0.3 * noise
        else:
            parameter.data = 0.3 * noise


def build(config: TransformerConfig, dtype: torch.dtype = torch.float32) -> LTX2Transformer:
    with torch.device("meta"):
        model = LTX2Transformer(config)
    model.to_empty(device="cpu")
    randomise(model)
    return model.to(dtype).requires_grad_(False).eval()


def build_pair(config: TransformerConfig) -> tuple[LTX2Transformer, LTX2VideoTransformer3DModel]:
    ours, theirs = build(config), diffusers_twin(config)
    state = ours.state_dict()
    names = {name: ".".join(RENAMED.get(part, part) for part in name.split(".")) for name in theirs.state_dict()}
    assert sorted(names.values()) == sorted(state)
    theirs.load_state_dict({name: state[ours_name] for name, ours_name in names.items()})
    return ours, theirs.requires_grad_(False)


def make_streams(
    config: TransformerConfig,
    video_timestep: Tensor,
    audio_timestep: Tensor,
    video_sigma: Tensor | None = None,
    audio_sigma: Tensor | None = None,
) -> tuple[Stream, Stream]:
    generator = torch.Generator().manual_seed(7)

    def stream(tokens: int, channels: int, timestep: Tensor, sigma: Tensor | None) -> Stream:
        return Stream(
            latents=torch.randn(BATCH, tokens, channels, generator=generator),
            timestep=timestep,
            sigma=timestep.reshape(BATCH, -1).amax(1) if sigma is None else sigma,
            context=torch.randn(BATCH, TEXT_TOKENS, config.caption_channels, generator=generator),
        )

    return (
        stream(GEOMETRY.video_tokens, config.in_channels, video_timestep, video_sigma),
        stream(GEOMETRY.audio_tokens, config.audio_in_channels, audio_timestep, audio_sigma),
    )


def run_ours(model: LTX2Transformer, video: Stream | None, audio: Stream | None) -> tuple[Any, Any]:
    stream = video or audio
    assert stream is not None
    rope = model.rope_tables(GEOMETRY, "cpu", stream.latents.dtype)
    with torch.no_grad():
        return model(video, audio, rope)


def run_diffusers(model: LTX2VideoTransformer3DModel, video: Stream, audio: Stream, **options: Any) -> tuple[Any, Any]:
    with torch.no_grad():
        out = model(
            hidden_states=video.latents,
            audio_hidden_states=audio.latents,
            encoder_hidden_states=video.context,
            audio_encoder_hidden_states=audio.context,
            timestep=video.timestep * 1000,
            audio_timestep=audio.timestep * 1000,
            sigma=video.sigma * 1000,
            audio_sigma=audio.sigma * 1000,
            num_frames=GEOMETRY.latent_frames,
            height=GEOMETRY.latent_height,
            width=GEOMETRY.latent_width,
            fps=GEOMETRY.fps,
            audio_num_frames=GEOMETRY.audio_tokens,
            **options,
        )
    return out.sample, out.audio_sample


def relative_error(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual - expected).abs().max() / expected.abs().max())


def per_token(sigma: Tensor, tokens: int, seed: int) -> Tensor:
    """Timesteps as image conditioning makes them: sigma times a mask between 0 and 1, some tokens clean."""
    mask = torch.rand(BATCH, tokens, generator=torch.Generator().manual_seed(seed))
    mask[:, ::4] = 0.0
    return sigma[:, None] * mask


SIGMA = torch.tensor([0.9, 0.421875])
OTHER_SIGMA = torch.tensor([0.3, 0.725])


@pytest.mark.parametrize("num_heads", [2, 4])
@pytest.mark.parametrize("use_cross_timestep", [False, True])
def test_text_to_video_equals_diffusers(num_heads: int, use_cross_timestep: bool) -> None:
    config = tiny_config(num_heads)
    ours, theirs = build_pair(config)
    video, audio = make_streams(config, SIGMA, SIGMA)

    actual = run_ours(ours, video, audio)
    expected = run_diffusers(theirs, video, audio, use_cross_timestep=use_cross_timestep)

    assert relative_error(actual[0], expected[0]) <= TOLERANCE
    assert relative_error(actual[1], expected[1]) <= TOLERANCE


def test_unequal_multipliers_equal_diffusers() -> None:
    # The released files have equal multipliers, which would hide a gate that forgets its own.
    config = tiny_config(av_timestep_scale_multiplier=250)
    ours, theirs = build_pair(config)
    video, audio = make_streams(config, SIGMA, SIGMA)

    actual, expected = run_ours(ours, video, audio), run_diffusers(theirs, video, audio, use_cross_timestep=True)

    assert relative_error(actual[0], expected[0]) <= TOLERANCE
    assert relative_error(actual[1], expected[1]) <= TOLERANCE


def cross_conditioned_diffusers(
    model: LTX2VideoTransformer3DModel, video: Stream, audio: Stream, **options: Any
) -> tuple[Any, Any]:
    """diffusers with the official choice: scale and shift from a stream's own timesteps, gate from the other's sigma.

    Its switch moves both at once, so it runs on own timesteps and the two gate modules are handed the other sigma.
    """

    def give(sigma: Tensor) -> Callable[..., Any]:
        return lambda module, args, kwargs: ((sigma * 1000,), kwargs)

    gates = [(model.av_cross_attn_video_a2v_gate, audio.sigma), (model.av_cross_attn_audio_v2a_gate, video.sigma)]
    hooks = [gate.register_forward_pre_hook(give(sigma), with_kwargs=True) for gate, sigma in gates]
    try:
        return run_diffusers(model, video, audio, use_cross_timestep=False, **options)
    finally:
        for hook in hooks:
            hook.remove()


TIMESTEPS = {
    "different scalars": (SIGMA, OTHER_SIGMA),
    "per-token video": (per_token(SIGMA, GEOMETRY.video_tokens, 1), SIGMA),
    "per-token both": (
        per_token(SIGMA, GEOMETRY.video_tokens, 1),
        per_token(OTHER_SIGMA, GEOMETRY.audio_tokens, 2),
    ),
    "frozen audio": (SIGMA, torch.zeros(BATCH, GEOMETRY.audio_tokens)),
}


@pytest.mark.parametrize("case", TIMESTEPS)
def test_official_cross_modulation_where_timesteps_differ(case: str) -> None:
    config = tiny_config(4)
    ours, theirs = build_pair(config)
    video, audio = make_streams(config, *TIMESTEPS[case], video_sigma=SIGMA, audio_sigma=OTHER_SIGMA)

    actual = run_ours(ours, video, audio)
    expected = cross_conditioned_diffusers(theirs, video, audio)

    assert relative_error(actual[0], expected[0]) <= TOLERANCE
    assert relative_error(actual[1], expected[1]) <= TOLERANCE
    for use_cross_timestep in (False, True):
        neither = run_diffusers(theirs, video, audio, use_cross_timestep=use_cross_timestep)
        assert relative_error(actual[0], neither[0]) > 1e-3
        assert relative_error(actual[1], neither[1]) > 1e-3


@pytest.mark.parametrize("case", TIMESTEPS)
def test_timesteps_reach_all_but_the_cross_attention_as_in_diffusers(case: str) -> None:
    # Without attention between the streams both codes agree, whatever the timesteps.
    config = tiny_config(4)
    ours, theirs = build_pair(config)
    video, audio = make_streams(config, *TIMESTEPS[case], video_sigma=SIGMA, audio_sigma=OTHER_SIGMA)

    expected = run_diffusers(theirs, video, audio, isolate_modalities=True)

    assert relative_error(run_ours(ours, video, None)[0], expected[0]) <= TOLERANCE
    assert relative_error(run_ours(ours, None, audio)[1], expected[1]) <= TOLERANCE


def test_missing_stream_is_not_computed() -> None:
    config = tiny_config()
    model = build(config)
    video, audio = make_streams(config, SIGMA, SIGMA)
    called: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, Attention):
            module.register_forward_hook(lambda *_, name=name: called.append(name.split(".")[-1]))

    assert run_ours(model, video, None)[1] is None
    assert called == ["attn1", "attn2"] * config.num_layers
    called.clear()
    assert run_ours(model, None, audio)[0] is None
    assert called == ["audio_attn1", "audio_attn2"] * config.num_layers
    called.clear()
    run_ours(model, video, audio)
    per_block = ["attn1", "attn2", "audio_attn1", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn"]
    assert called == per_block * config.num_layers


def test_attend_gets_no_mask_and_is_the_only_way_to_attention() -> None:
    config = tiny_config()
    model = build(config)
    video, audio = make_streams(config, SIGMA, SIGMA)
    expected = run_ours(model, video, audio)
    masks: list[Tensor | None] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        masks.append(mask)
        return torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, dim=-1) @ v

    for block in getattr(model, PLAN.blocks):
        for attention in PLAN.attentions:
            getattr(block, attention.name).attend = attend
    actual = run_ours(model, video, audio)

    assert masks == [None] * (6 * config.num_layers)
    assert relative_error(actual[0], expected[0]) <= TOLERANCE
    assert relative_error(actual[1], expected[1]) <= TOLERANCE


class RowwiseLinear(nn.Linear):
    """A Linear whose rows do not depend on how many there are; BLAS picks another summation order for another count."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.bias is not None
        return (x.unsqueeze(-2) * self.weight).sum(-1) + self.bias


def test_one_timestep_per_sample_is_one_row_and_equals_the_same_timestep_per_token() -> None:
    config = tiny_config()
    model = build(config)
    one = make_streams(config, SIGMA, OTHER_SIGMA)
    many = tuple(
        dataclasses.replace(stream, timestep=stream.timestep[:, None].repeat(1, stream.latents.shape[1]))
        for stream in one
    )
    rows: list[int] = []
    modules = [module for module in model.modules() if isinstance(module, AdaLayerNorm)]
    for module in modules:
        module.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[1]))

    close = [run_ours(model, *streams) for streams in (one, many)]
    for adaln in modules:
        for linear in adaln.modules():
            if isinstance(linear, nn.Linear):
                linear.__class__ = RowwiseLinear
    exact = [run_ours(model, *streams) for streams in (one, many)]

    assert rows[:6] == [1] * 6
    assert sorted(rows[6:12]) == [1, 1, 7, 7, 18, 18]
    for index in (0, 1):
        assert relative_error(close[0][index], close[1][index]) <= TOLERANCE
        assert torch.equal(exact[0][index], exact[1][index])


def test_batch_items_do_not_mix() -> None:
    config = tiny_config()
    model = build(config)
    video, audio = make_streams(config, per_token(SIGMA, GEOMETRY.video_tokens, 1), OTHER_SIGMA)
    both = run_ours(model, video, audio)

    for item in range(BATCH):
        alone = run_ours(
            model,
            *(
                Stream(
                    **{field.name: getattr(stream, field.name)[item : item + 1] for field in dataclasses.fields(Stream)}
                )
                for stream in (video, audio)
            ),
        )
        assert relative_error(both[0][item : item + 1], alone[0]) <= TOLERANCE
        assert relative_error(both[1][item : item + 1], alone[1]) <= TOLERANCE


def test_inputs_and_tables_are_left_as_they_were() -> None:
    config = tiny_config()
    model = build(config)
    video, audio = make_streams(config, SIGMA, SIGMA)
    rope = model.rope_tables(GEOMETRY, "cpu", torch.float32)
    watched = [
        *(getattr(stream, field.name) for stream in (video, audio) for field in dataclasses.fields(Stream)),
        *(table for field in dataclasses.fields(rope) for table in getattr(rope, field.name)),
    ]
    before = [tensor.clone() for tensor in watched]

    first, second = run_ours(model, video, audio), run_ours(model, video, audio)

    assert all(torch.equal(was, now) for was, now in zip(before, watched, strict=True))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_bf16_rotates_in_bf16_as_the_official_code() -> None:
    config = tiny_config()
    model = build(config, torch.bfloat16)
    streams = [
        dataclasses.replace(stream, latents=stream.latents.bfloat16(), context=stream.context.bfloat16())
        for stream in make_streams(config, SIGMA, SIGMA)
    ]
    tables = model.rope_tables(GEOMETRY, "cpu", torch.bfloat16)
    exact = model.rope_tables(GEOMETRY, "cpu", torch.float32)
    assert tables.video[0].dtype == torch.bfloat16
    assert torch.equal(tables.video[0], exact.video[0].bfloat16())

    queries: list[Tensor] = []
    attention = model.transformer_blocks[0].attn1
    plain = attention.attend
    attention.attend = lambda q, k, v, mask: queries.append(q) or plain(q, k, v, mask)
    normed: list[Tensor] = []
    attention.q_norm.register_forward_hook(lambda module, args, out: normed.append(out))
    velocities = run_ours(model, *streams)

    assert {velocity.dtype for velocity in velocities} == {torch.bfloat16}
    heads = normed[0].unflatten(-1, (config.num_attention_heads, -1)).transpose(1, 2)
    first, second = heads.chunk(2, dim=-1)
    cos, sin = tables.video
    # Product, then fused multiply-add: each of the two steps rounds to bf16.
    expected = torch.cat(
        [
            ((first * cos).float() - second.float() * sin.float()).bfloat16(),
            ((second * cos).float() + first.float() * sin.float()).bfloat16(),
        ],
        dim=-1,
    )
    assert torch.equal(queries[0], expected)


def test_wrong_calls_are_refused() -> None:
    config = tiny_config()
    model = build(config)
    video, audio = make_streams(config, SIGMA, SIGMA)
    other = model.rope_tables(dataclasses.replace(GEOMETRY, audio_tokens=8), "cpu", torch.float32)

    with pytest.raises(ValueError, match="neither a video nor an audio stream"):
        model(None, None, other)
    with pytest.raises(ValueError, match="audio stream has 7 tokens and the position tables 8"):
        model(video, audio, other)


def test_full_size_builds_and_runs_on_meta() -> None:
    # A meta tensor has no value, so a forward that asked the device for one would raise here.
    geometry = Geometry(latent_frames=16, latent_height=24, latent_width=40, fps=24.0, audio_tokens=126)
    with torch.device("meta"):
        model = LTX2Transformer(FULL_SIZE).bfloat16()
        video, audio = (
            Stream(
                latents=torch.empty(1, tokens, 128, dtype=torch.bfloat16),
                timestep=torch.empty(1),
                sigma=torch.empty(1),
                context=torch.empty(1, 1024, 3840, dtype=torch.bfloat16),
            )
            for tokens in (geometry.video_tokens, geometry.audio_tokens)
        )
    rope = model.rope_tables(geometry, "meta", torch.bfloat16)
    per_token_video = dataclasses.replace(video, timestep=torch.empty(1, geometry.video_tokens, device="meta"))
    with torch.no_grad():
        velocities = model(video, audio, rope)
        per_token_velocities = model(per_token_video, audio, rope)

    assert len(model.state_dict()) == 3510
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(18.876e9, abs=0.5e6)
    assert rope.video[0].shape == (1, 32, 15360, 64)
    assert rope.video_cross[0].shape == (1, 32, 15360, 32)
    assert rope.audio[0].shape == rope.audio_cross[0].shape == (1, 32, 126, 32)
    for video_velocity, audio_velocity in (velocities, per_token_velocities):
        assert video_velocity.shape == (1, 15360, 128)
        assert audio_velocity.shape == (1, 126, 128)


def test_plan_names_what_the_model_has() -> None:
    with torch.device("meta"):
        model = LTX2Transformer(tiny_config())
    for block in getattr(model, PLAN.blocks):
        attentions = {name for name, module in block.named_modules() if isinstance(module, Attention)}
        assert attentions == {attention.name for attention in PLAN.attentions}
        assert all(getattr(getattr(block, name), PLAN.num_heads) == 2 for name in attentions)
        linears = [name for name, module in block.named_modules() if isinstance(module, nn.Linear)]
        assert len(linears) == 28
        assert all(f".{name}".endswith(PLAN.quantizable) for name in linears)
