"""The LTX-2 transformer against diffusers with shared random weights, and where the official code differs from it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import LTX2VideoTransformer3DModel
from torch import Tensor, nn

from tests.models.ltx2.transformer_oracle import (
    BATCH,
    GEOMETRY,
    OTHER_SIGMA,
    SIGMA,
    TOLERANCE,
    build,
    build_pair,
    by_hand,
    full_size,
    item,
    make_streams,
    per_token,
    relative_error,
    run_diffusers,
    run_ours,
    tiny_config,
)
from vgen.models.attention import Attention
from vgen.models.ltx2.adaln import AdaLayerNorm
from vgen.models.ltx2.geometry import Geometry
from vgen.models.ltx2.perturbation import Perturbation
from vgen.models.ltx2.plan import PLAN
from vgen.models.ltx2.transformer import LTX2Transformer, Stream, TextKeysValues


@pytest.mark.parametrize("num_heads", [2, 4])
@pytest.mark.parametrize("use_cross_timestep", [False, True])
def test_text_to_video_equals_diffusers(num_heads: int, use_cross_timestep: bool) -> None:
    config = tiny_config(num_heads=num_heads)
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
    config = tiny_config(num_heads=4)
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
    config = tiny_config(num_heads=4)
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


def expand_rows(stream: Stream) -> Stream:
    """The same timesteps given for each token."""
    if stream.rows is None:
        timestep = stream.timestep[:, None].repeat(1, stream.latents.shape[1])
    else:
        timestep = stream.timestep.gather(1, stream.rows)
    return dataclasses.replace(stream, timestep=timestep, rows=None)


def distinct_timesteps(stream: Stream, factors: list[float], seed: int) -> Stream:
    """As many timesteps per sample as factors, in any order and without a pattern over the tokens."""
    rows = torch.randint(len(factors), stream.latents.shape[:2], generator=torch.Generator().manual_seed(seed))
    return dataclasses.replace(stream, timestep=stream.sigma[:, None] * torch.tensor(factors), rows=rows)


def count_rows(model: LTX2Transformer) -> list[int]:
    rows: list[int] = []
    for module in model.modules():
        if isinstance(module, AdaLayerNorm):
            module.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[1]))
    return rows


def assert_equal(actual: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])


@pytest.mark.parametrize("version", ["2.0", "2.3"])
def test_one_timestep_per_sample_is_one_row_and_equals_per_token_to_the_last_bit(version: str) -> None:
    config = tiny_config(version)
    model = build(config)
    streams = make_streams(config, SIGMA, OTHER_SIGMA)
    rows = count_rows(model)

    one = run_ours(model, *streams)
    assert set(rows) == {1}
    rows.clear()
    many = run_ours(model, *map(expand_rows, streams))

    # The gates and, in 2.3, the text have one sigma per sample anyway.
    assert sorted(rows) == [1] * (2 if version == "2.0" else 4) + [7, 7, 18, 18]
    assert_equal(one, many)


@pytest.mark.parametrize("version", ["2.0", "2.3"])
def test_distinct_timesteps_are_looked_up_and_equal_per_token_to_the_last_bit(version: str) -> None:
    config = tiny_config(version)
    model = build(config)
    video, audio = make_streams(config, SIGMA, OTHER_SIGMA)
    video, audio = distinct_timesteps(video, [1.0, 0.0, 0.35], 1), distinct_timesteps(audio, [0.0, 1.0], 2)
    rows = count_rows(model)

    looked_up = run_ours(model, video, audio)
    assert set(rows) <= {1, 2, 3}
    many = run_ours(model, expand_rows(video), expand_rows(audio))

    assert_equal(looked_up, many)
    expected = by_hand(model, expand_rows(video), expand_rows(audio))
    assert relative_error(looked_up[0], expected[0]) <= TOLERANCE
    assert relative_error(looked_up[1], expected[1]) <= TOLERANCE


def test_one_row_or_many_is_the_same_for_any_number_of_timesteps() -> None:
    module = AdaLayerNorm(64, 6)
    sinusoids = torch.randn(1, 300, 256, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        rows, embedded = module(sinusoids)
        assert rows.shape == (1, 300, 6, 64)
        for count in (1, 2, 3, 5, 17, 64, 65):
            few_rows, few_embedded = module(sinusoids[:, :count])
            assert torch.equal(few_rows, rows[:, :count])
            assert torch.equal(few_embedded, embedded[:, :count])
    direct = module.emb["timestep_embedder"](sinusoids)
    torch.testing.assert_close(embedded, direct, rtol=0, atol=1e-6)


@pytest.mark.parametrize("version", ["2.0", "2.3"])
@pytest.mark.parametrize(
    "geometry",
    [
        Geometry(latent_frames=4, latent_height=4, latent_width=4, fps=24.0, audio_tokens=32),
        Geometry(latent_frames=3, latent_height=3, latent_width=1, fps=24.0, audio_tokens=6),
        Geometry(latent_frames=2, latent_height=1, latent_width=1, fps=24.0, audio_tokens=2),
    ],
    ids=["tokens are as many as channels", "as many as rows", "as many as samples"],
)
def test_timesteps_per_token_where_sizes_coincide(version: str, geometry: Geometry) -> None:
    """A (B, T) timestep broadcast along the wrong dim would pass for one of D or n or B here."""
    config = tiny_config(version)
    model = build(config)
    timesteps = per_token(SIGMA, geometry.video_tokens, 1), per_token(OTHER_SIGMA, geometry.audio_tokens, 2)
    streams = make_streams(config, *timesteps, video_sigma=SIGMA, audio_sigma=OTHER_SIGMA, geometry=geometry)
    if geometry.audio_tokens == 32:
        assert (geometry.video_tokens, geometry.audio_tokens) == (config.width, config.audio_width)

    actual = run_ours(model, *streams, geometry=geometry)
    expected = by_hand(model, *streams, geometry=geometry)

    assert relative_error(actual[0], expected[0]) <= TOLERANCE
    assert relative_error(actual[1], expected[1]) <= TOLERANCE


@pytest.mark.parametrize("version", ["2.0", "2.3"])
def test_prepared_text_changes_no_bit(version: str) -> None:
    config = tiny_config(version)
    model = build(config)
    video, audio = make_streams(config, SIGMA, OTHER_SIGMA)
    expected = run_ours(model, video, audio)

    with torch.no_grad():
        prepared = model.prepare_text(video.context, "video"), model.prepare_text(audio.context, "audio")
    calls: list[str] = []
    for name, module in model.named_modules():
        if name.endswith(("attn2.to_k", "attn2.to_v", "caption_projection")):
            module.register_forward_hook(lambda *_, name=name: calls.append(name))
    streams = (dataclasses.replace(s, context=text) for s, text in zip((video, audio), prepared, strict=True))
    actual = run_ours(model, *streams)

    assert_equal(actual, expected)
    if version == "2.3":  # the text depends on the noise level
        assert prepared[0] is video.context
        assert prepared[1] is audio.context
        assert len(calls) == 2 * 2 * config.num_layers
    else:
        assert calls == []
        for text, stream in zip(prepared, (video, audio), strict=True):
            assert isinstance(text, TextKeysValues)
            assert len(text.blocks) == config.num_layers
            assert text.blocks[0].keys.shape[:3] == (BATCH, config.num_attention_heads, stream.context.shape[1])


@pytest.mark.parametrize("version", ["2.0", "2.3"])
@pytest.mark.parametrize("disabled", ["video", "audio", "both"])
def test_a_stream_that_is_not_enabled_stays_and_is_read(version: str, disabled: str) -> None:
    config = tiny_config(version)
    model = build(config)
    timesteps = per_token(SIGMA, GEOMETRY.video_tokens, 1), per_token(OTHER_SIGMA, GEOMETRY.audio_tokens, 2)
    video, audio = make_streams(config, *timesteps, video_sigma=SIGMA, audio_sigma=OTHER_SIGMA)
    both = run_ours(model, video, audio)
    video = dataclasses.replace(video, enabled=disabled == "audio")
    audio = dataclasses.replace(audio, enabled=disabled == "video")
    called: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, Attention) or name.endswith((".ff", "_ff")):
            module.register_forward_hook(lambda *_, name=name: called.append(name.split(".")[-1]))

    actual = run_ours(model, video, audio)
    expected = by_hand(model, video, audio)

    running = {
        "video": ["audio_attn1", "audio_attn2", "video_to_audio_attn", "audio_ff"],
        "audio": ["attn1", "attn2", "audio_to_video_attn", "ff"],
        "both": [],
    }
    assert called == running[disabled] * config.num_layers
    for index in (0, 1):
        assert relative_error(actual[index], expected[index]) <= TOLERANCE
        # The enabled stream reads tokens that no block has changed, so it is not what it was either.
        assert relative_error(actual[index], both[index]) > 1e-3


def test_batch_items_do_not_mix() -> None:
    config = tiny_config()
    model = build(config)
    video, audio = make_streams(config, per_token(SIGMA, GEOMETRY.video_tokens, 1), OTHER_SIGMA)
    both = run_ours(model, video, audio)

    for index in range(BATCH):
        alone = run_ours(model, item(video, index), item(audio, index))
        assert relative_error(both[0][index : index + 1], alone[0]) <= TOLERANCE
        assert relative_error(both[1][index : index + 1], alone[1]) <= TOLERANCE


def test_inputs_and_tables_are_left_as_they_were() -> None:
    config = tiny_config()
    model = build(config)
    video, audio = (distinct_timesteps(s, [1.0, 0.25], 3) for s in make_streams(config, SIGMA, SIGMA))
    rope = model.rope_tables(GEOMETRY, "cpu", torch.float32)
    watched = [
        *(value for stream in (video, audio) for value in vars(stream).values() if isinstance(value, Tensor)),
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
    rope = model.rope_tables(GEOMETRY, "cpu", torch.float32)
    for wrong in (
        {"timestep": torch.rand(BATCH, 1)},
        {"timestep": torch.rand(BATCH, 3)},
        {"timestep": torch.rand(18, BATCH)},
        {"timestep": torch.rand(BATCH + 1)},
        {"rows": torch.zeros(BATCH, 18, dtype=torch.long)},
        {"timestep": torch.rand(BATCH, 3), "rows": torch.zeros(BATCH, 17, dtype=torch.long)},
        {"timestep": torch.rand(BATCH + 1, 3), "rows": torch.zeros(BATCH, 18, dtype=torch.long)},
    ):
        with pytest.raises(ValueError, match=r"video stream has 2 x 18 tokens and timesteps .* per sample, or one per"):
            model(dataclasses.replace(video, **wrong), audio, rope)


SIZES = {"2.0": (3510, 18.876e9), "2.3": (4186, 18.989e9)}


@pytest.mark.parametrize("version", SIZES)
def test_full_size_has_the_tensors_and_parameters_of_the_checkpoint(version: str) -> None:
    tensors, parameters = SIZES[version]
    with torch.device("meta"):
        model = LTX2Transformer(full_size(version))
    assert len(model.state_dict()) == tensors
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(parameters, abs=0.5e6)


@pytest.mark.parametrize("version", SIZES)
def test_full_width_runs_on_meta(version: str) -> None:
    # A meta tensor has no value, so a forward that asked the device for one would raise here.
    geometry = Geometry(latent_frames=16, latent_height=24, latent_width=40, fps=24.0, audio_tokens=126)
    config = dataclasses.replace(full_size(version), num_layers=1)
    widths = (3840, 3840) if version == "2.0" else (4096, 2048)
    with torch.device("meta"):
        model = LTX2Transformer(config).bfloat16().requires_grad_(False)
        video, audio = (
            Stream(
                latents=torch.empty(2, tokens, 128, dtype=torch.bfloat16),
                timestep=torch.empty(2, 3),
                sigma=torch.empty(2),
                context=torch.empty(2, 1024, width, dtype=torch.bfloat16),
                rows=torch.empty(2, tokens, dtype=torch.long),
            )
            for tokens, width in zip((geometry.video_tokens, geometry.audio_tokens), widths, strict=True)
        )
    rope = model.rope_tables(geometry, "meta", torch.bfloat16)
    some = (Perturbation(skip_video_self="all", skip_audio_to_video=(0,)), Perturbation())
    velocities = model(video, audio, rope, some)

    assert rope.video[0].shape == (1, 32, 15360, 64)
    assert rope.video_cross[0].shape == (1, 32, 15360, 32)
    assert rope.audio[0].shape == rope.audio_cross[0].shape == (1, 32, 126, 32)
    assert velocities[0].shape == (2, 15360, 128)
    assert velocities[1].shape == (2, 126, 128)


@pytest.mark.parametrize(("version", "num_linears", "num_gates"), [("2.0", 28, 0), ("2.3", 28, 6)])
def test_plan_names_what_the_model_has(version: str, num_linears: int, num_gates: int) -> None:
    with torch.device("meta"):
        model = LTX2Transformer(tiny_config(version))
    for block in getattr(model, PLAN.blocks):
        attentions = {name for name, module in block.named_modules() if isinstance(module, Attention)}
        assert attentions == {attention.name for attention in PLAN.attentions}
        assert all(getattr(getattr(block, name), PLAN.num_heads) == 2 for name in attentions)
        linears = [name for name, module in block.named_modules() if isinstance(module, nn.Linear)]
        gates = [name for name in linears if name.endswith("to_gate_logits")]
        assert len(gates) == num_gates
        assert not any(f".{name}".endswith(PLAN.quantizable) for name in gates)
        assert len(linears) - len(gates) == num_linears
        assert all(f".{name}".endswith(PLAN.quantizable) for name in linears if name not in gates)
