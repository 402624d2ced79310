"""The Wan transformer against diffusers with shared random weights, and against the official maths."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.wan.wan_transformer_oracle import (
    BATCH,
    GEOMETRY,
    TIMESTEP,
    TINY,
    TOLERANCE,
    VARIANTS,
    build,
    by_hand,
    diffusers_twin,
    make_inputs,
    make_stream,
    relative_error,
    run_diffusers,
    run_ours,
)
from vgen.models.attention import sdpa
from vgen.models.wan.attention import Attention
from vgen.models.wan.config import WanTransformerConfig
from vgen.models.wan.embedding import sinusoid
from vgen.models.wan.geometry import Geometry
from vgen.models.wan.patches import patchify, unpatchify
from vgen.models.wan.plan import PLAN, keeps_float32
from vgen.models.wan.rope import rotate
from vgen.models.wan.transformer import PreparedContext, Stream, WanTransformer


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_equals_diffusers(variant: str) -> None:
    model = build(VARIANTS[variant], "model")
    inputs = make_inputs(model.config)

    assert (
        relative_error(run_ours(model, make_stream(inputs)), run_diffusers(diffusers_twin(model), inputs)) < TOLERANCE
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_equals_the_official_maths(variant: str) -> None:
    model = build(VARIANTS[variant])
    inputs = make_inputs(model.config)
    actual = run_ours(model, make_stream(inputs))

    assert relative_error(actual, by_hand(model, inputs)) < TOLERANCE
    # The sinusoid of the timestep is the one difference in fp32.
    assert relative_error(actual, run_diffusers(diffusers_twin(model), inputs)) < 1e-5


@pytest.mark.parametrize("residual", ["fp32", "model"])
def test_without_a_norm_before_cross_attention(residual: Any) -> None:
    model = build(dataclasses.replace(TINY, cross_attn_norm=False), residual)
    inputs = make_inputs(model.config)

    expected = by_hand(model, inputs) if residual == "fp32" else run_diffusers(diffusers_twin(model), inputs)

    assert relative_error(run_ours(model, make_stream(inputs)), expected) < TOLERANCE


def equal_part(actual: Tensor, expected: Tensor) -> float:
    assert actual.dtype == expected.dtype
    return float((actual == expected).double().mean())


@pytest.mark.parametrize("variant", VARIANTS)
def test_bf16_rounds_where_diffusers_rounds(variant: str) -> None:
    config = VARIANTS[variant]
    # One sample: diffusers cuts the text out of a longer tensor, and a linear map of a part that is not contiguous
    # rounds before it adds the bias.
    model, low = build(config, "model", torch.bfloat16), make_inputs(config).item(0).to(torch.bfloat16)
    expected = run_diffusers(diffusers_twin(build(config, "model"), torch.bfloat16), low)

    # All bits are equal where this was written; a last one may differ, as positions turn by fused multiply-adds.
    # All bits are equal where this was written; a last one may differ, as positions turn by fused multiply-adds.
    assert equal_part(run_ours(model, make_stream(low)), expected) > 0.95
    official = run_ours(build(config, "fp32", torch.bfloat16), make_stream(low))
    assert equal_part(official.bfloat16(), expected) < 0.5


def root_mean_square_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def exact_attend(q: Tensor, k: Tensor, v: Tensor, _: Tensor | None) -> Tensor:
    """Kernels round the probabilities in their own ways."""
    return sdpa(q.double(), k.double(), v.double()).to(v.dtype)


@pytest.mark.parametrize("variant", VARIANTS)
def test_bf16_rounds_where_the_official_code_rounds(variant: str) -> None:
    config = VARIANTS[variant]
    low = make_inputs(config).to(torch.bfloat16)
    expected = by_hand(build(config), low, torch.bfloat16)
    errors = {}
    for residual in ("fp32", "model"):
        model = build(config, residual, torch.bfloat16)  # type: ignore[arg-type]
        for block in model.blocks:
            block.attn1.attend = block.attn2.attend = exact_attend
        actual = run_ours(model, make_stream(low))
        assert actual.dtype == (torch.float32 if residual == "fp32" else torch.bfloat16)
        errors[residual] = root_mean_square_error(actual, expected)

    assert errors["fp32"] < 1e-3
    assert errors["model"] > 4e-3


@pytest.mark.parametrize(("residual", "dtype"), [("fp32", torch.float32), ("model", torch.bfloat16)])
def test_the_dtype_of_the_tokens_between_blocks(residual: Any, dtype: torch.dtype) -> None:
    model = build(TINY, residual, torch.bfloat16)
    dtypes: list[torch.dtype] = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, args, out: dtypes.extend([args[0].dtype, out.dtype]))
        for name in ("attn1", "attn2", "ffn"):
            block.get_submodule(name).register_forward_pre_hook(lambda _, args: layers.append(args[0].dtype))
    layers: list[torch.dtype] = []

    run_ours(model, make_stream(make_inputs(TINY).to(torch.bfloat16)))

    assert dtypes == [dtype] * 4
    assert layers == [torch.bfloat16] * 6


def first_frame_clean(timestep: Tensor) -> tuple[Tensor, Tensor]:
    """Timesteps of TI2V-5B with an image, per token, and as two rows with the row of each token."""
    rows = (torch.arange(GEOMETRY.video_tokens) >= GEOMETRY.frame_tokens).long().expand(BATCH, -1)
    distinct = torch.stack([torch.zeros_like(timestep), timestep], dim=1)
    return distinct.gather(1, rows), distinct


def scattered(timestep: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three timesteps per sample, without a pattern over the tokens."""
    rows = torch.randint(3, (BATCH, GEOMETRY.video_tokens), generator=torch.Generator().manual_seed(3))
    distinct = torch.stack([timestep, timestep // 3, torch.zeros_like(timestep)], dim=1)
    return distinct.gather(1, rows), distinct, rows


def count_rows(model: WanTransformer) -> list[torch.Size]:
    shapes: list[torch.Size] = []
    model.condition_embedder.time_proj.register_forward_pre_hook(lambda _, args: shapes.append(args[0].shape[:2]))
    return shapes


def test_two_timesteps_are_two_rows_and_equal_one_per_token() -> None:
    model = build(VARIANTS["ti2v"], "model")
    per_token, distinct = first_frame_clean(TIMESTEP)
    rows = (torch.arange(GEOMETRY.video_tokens) >= GEOMETRY.frame_tokens).long().expand(BATCH, -1)
    inputs = make_inputs(model.config, per_token)
    shapes = count_rows(model)

    many = run_ours(model, make_stream(inputs))
    two = run_ours(model, dataclasses.replace(make_stream(inputs), timestep=distinct, rows=rows))

    assert shapes == [(BATCH, GEOMETRY.video_tokens), (BATCH, 2)]
    expected = run_diffusers(diffusers_twin(model), inputs)
    assert relative_error(many, expected) < TOLERANCE
    assert relative_error(two, expected) < TOLERANCE
    # Not the timestep of the first frame, of the others, or of the other sample for all.
    for wrong in (TIMESTEP, torch.zeros_like(TIMESTEP), TIMESTEP.flip(0)):
        assert (
            relative_error(run_ours(model, make_stream(dataclasses.replace(inputs, timestep=wrong))), expected) > 1e-2
        )


def test_any_rows_equal_the_official_maths() -> None:
    model = build(VARIANTS["ti2v"])
    per_token, distinct, rows = scattered(TIMESTEP)
    stream = dataclasses.replace(make_stream(make_inputs(model.config)), timestep=distinct, rows=rows)
    inputs = make_inputs(model.config, per_token)

    twin = diffusers_twin(model)
    assert relative_error(run_ours(model, stream), run_diffusers(twin, inputs)) < 1e-5
    assert relative_error(run_ours(model, stream), run_ours(model, make_stream(inputs))) < TOLERANCE


def test_one_timestep_equals_it_on_every_token() -> None:
    model = build(VARIANTS["ti2v"], "model")
    inputs = make_inputs(model.config)
    shapes = count_rows(model)
    actual = run_ours(model, make_stream(inputs))

    assert shapes == [(BATCH, 1)]
    everywhere = dataclasses.replace(inputs, timestep=TIMESTEP[:, None].expand(-1, GEOMETRY.video_tokens))
    assert relative_error(actual, run_diffusers(diffusers_twin(model), everywhere)) < TOLERANCE


def test_fractional_timesteps_are_not_truncated() -> None:
    model = build(TINY)
    whole, fraction = (make_inputs(TINY, torch.tensor([999.0, at])) for at in (421.0, 421.5))
    actual = run_ours(model, make_stream(fraction))
    assert relative_error(actual, by_hand(model, fraction)) < TOLERANCE
    assert relative_error(actual, run_ours(model, make_stream(whole))) > 1e-4


def test_the_sinusoid_is_cosines_then_sines_in_the_dtype_asked_for() -> None:
    timestep = torch.tensor([[999, 1, 0]])
    waves = sinusoid(timestep, 8, torch.float64)
    angles = timestep.double()[..., None] * torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64)
    torch.testing.assert_close(waves, torch.cat([angles.cos(), angles.sin()], dim=-1), rtol=0, atol=1e-12)
    assert sinusoid(timestep, 8, torch.float32).dtype == torch.float32


@pytest.mark.parametrize("variant", ["t2v", "i2v_2_1", "flf2v"])
def test_prepared_text_changes_no_bit_and_is_not_computed_again(variant: str) -> None:
    model = build(VARIANTS[variant], dtype=torch.bfloat16)
    stream = make_stream(make_inputs(model.config).to(torch.bfloat16))
    expected = run_ours(model, stream)

    assert isinstance(stream.context, Tensor)
    with torch.no_grad():
        prepared = model.prepare_text(stream.context, stream.image)
    calls: list[str] = []
    for name, module in model.named_modules():
        if name.endswith(("attn2.to_k", "attn2.to_v", "k_proj", "v_proj", "text_embedder", "image_embedder")):
            module.register_forward_hook(lambda *_, name=name: calls.append(name))
    actual = run_ours(model, dataclasses.replace(stream, context=prepared, image=None))

    assert torch.equal(actual, expected)
    assert calls == []
    assert len(prepared.blocks) == model.config.num_layers
    assert {t.dtype for b in prepared.blocks for kv in (b.text, b.image) if kv for t in kv} == {torch.bfloat16}


@pytest.mark.parametrize(("variant", "per_block"), [("t2v", [18, 512]), ("i2v_2_1", [18, 512, 5])])
def test_attend_gets_no_mask_and_is_the_only_way_to_attention(variant: str, per_block: list[int]) -> None:
    model = build(VARIANTS[variant])
    stream = make_stream(make_inputs(model.config))
    expected = run_ours(model, stream)
    seen: list[tuple[int, Tensor | None]] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        seen.append((k.shape[2], mask))
        assert q.transpose(1, 2).is_contiguous()
        return torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, dim=-1) @ v

    for block in getattr(model, PLAN.blocks):
        for attention in PLAN.attentions:
            getattr(block, attention.name).attend = attend
    actual = run_ours(model, stream)

    assert seen == [(length, None) for length in per_block] * model.config.num_layers
    assert relative_error(actual, expected) < TOLERANCE


def test_batch_items_do_not_mix() -> None:
    model = build(VARIANTS["i2v_2_1"])
    inputs = make_inputs(model.config)
    both = run_ours(model, make_stream(inputs))
    for index in range(BATCH):
        alone = run_ours(model, make_stream(inputs.item(index)))
        assert relative_error(both[index : index + 1], alone) < TOLERANCE


def test_inputs_and_tables_are_left_as_they_were() -> None:
    model = build(VARIANTS["i2v_2_1"])
    _, distinct, rows = scattered(TIMESTEP)
    stream = dataclasses.replace(make_stream(make_inputs(model.config)), timestep=distinct, rows=rows)
    watched = [*(v for v in vars(stream).values() if isinstance(v, Tensor)), *model.rope_tables(GEOMETRY, "cpu")]
    before = [tensor.clone() for tensor in watched]

    first, second = run_ours(model, stream), run_ours(model, stream)

    assert all(torch.equal(was, now) for was, now in zip(before, watched, strict=True))
    assert torch.equal(first, second)


def test_tables_are_those_of_diffusers_and_built_once() -> None:
    # A head of 128 as at full size, whose axes have 44, 42 and 42 values.
    config = dataclasses.replace(TINY, num_attention_heads=1, attention_head_dim=128, rope_max_seq_len=64)
    model = build(config)
    geometry = Geometry(latent_frames=31, latent_height=44, latent_width=80)
    cos, sin = model.rope_tables(geometry, "cpu")
    their_cos, their_sin = diffusers_twin(model).rope(torch.empty(1, 1, 31, 44, 80))

    assert cos.shape == sin.shape == (1, 1, geometry.video_tokens, 64)
    torch.testing.assert_close(cos, their_cos[..., 0::2].transpose(1, 2), rtol=0, atol=1e-7)
    torch.testing.assert_close(sin, their_sin[..., 1::2].transpose(1, 2), rtol=0, atol=1e-7)
    assert model.rope_tables(Geometry(31, 44, 80), torch.device("cpu"))[0] is cos
    assert model.rope_tables(Geometry(31, 44, 78), "cpu")[0] is not cos
    with pytest.raises(ValueError, match="65 patches long along one axis and the model has 64 positions"):
        model.rope_tables(Geometry(65, 4, 4), "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_turns_neighbours_in_fp32_and_keeps_the_memory_order(dtype: torch.dtype) -> None:
    x = torch.randn(2, 5, 3, 8, generator=torch.Generator().manual_seed(0)).to(dtype).transpose(1, 2)
    angles = torch.randn(1, 1, 5, 4, generator=torch.Generator().manual_seed(1))
    turned = rotate(x, angles.cos(), angles.sin())

    expected = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous()) * torch.polar(
        torch.ones_like(angles), angles
    )
    torch.testing.assert_close(turned, torch.view_as_real(expected).flatten(-2), rtol=0, atol=1e-6)
    assert turned.dtype == torch.float32
    assert turned.transpose(1, 2).is_contiguous()


def test_patches_are_the_order_of_the_convolution_and_of_the_head() -> None:
    geometry = Geometry(latent_frames=3, latent_height=4, latent_width=6)
    latents = torch.randn(2, 5, 3, 4, 6)
    tokens = patchify(latents, geometry)
    conv = nn.Conv3d(5, 7, kernel_size=(1, 2, 2), stride=(1, 2, 2))

    by_convolution = conv(latents).flatten(2).transpose(1, 2)
    torch.testing.assert_close(F.linear(tokens, conv.weight.flatten(1), conv.bias), by_convolution)
    channels_last = tokens.unflatten(-1, (5, 4)).transpose(-1, -2).flatten(-2)
    assert torch.equal(unpatchify(channels_last, geometry), latents)
    condition = torch.randn(2, 3, 3, 4, 6)
    together = patchify(torch.cat([latents, condition], dim=1), geometry)
    assert torch.equal(together, torch.cat([tokens, patchify(condition, geometry)], dim=-1))


def test_geometry_counts_tokens_and_refuses_half_a_patch() -> None:
    geometry = Geometry(latent_frames=31, latent_height=44, latent_width=80)
    assert (geometry.grid, geometry.frame_tokens, geometry.video_tokens) == ((31, 22, 40), 880, 27280)
    assert Geometry(1, 2, 2).video_tokens == 1
    with pytest.raises(ValueError, match="45 latents of height are no whole number of patches; use a multiple of 2"):
        Geometry(latent_frames=31, latent_height=45, latent_width=80)
    with pytest.raises(ValueError, match="0 latents of frames"):
        Geometry(latent_frames=0, latent_height=4, latent_width=4)


def test_wrong_calls_are_refused() -> None:
    model, reader = build(TINY), build(VARIANTS["flf2v"])
    stream, with_image = make_stream(make_inputs(TINY)), make_stream(make_inputs(reader.config))
    rope = model.rope_tables(GEOMETRY, "cpu")
    with pytest.raises(ValueError, match="the stream has 18 tokens and the position tables 24"):
        model(stream, model.rope_tables(dataclasses.replace(GEOMETRY, latent_frames=4), "cpu"))
    for wrong in (
        {"timestep": torch.rand(BATCH, 1)},
        {"timestep": torch.rand(18, BATCH)},
        {"timestep": torch.rand(BATCH + 1)},
        {"rows": torch.zeros(BATCH, 18, dtype=torch.long)},
        {"timestep": torch.rand(BATCH, 3), "rows": torch.zeros(BATCH, 17, dtype=torch.long)},
        {"timestep": torch.rand(BATCH + 1, 3), "rows": torch.zeros(BATCH, 18, dtype=torch.long)},
    ):
        with pytest.raises(ValueError, match=r"the stream has 2 x 18 tokens and timesteps .* per sample, or one per"):
            model(dataclasses.replace(stream, **wrong), rope)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="does not attend to an image and got one"):
        model(dataclasses.replace(stream, image=with_image.image), rope)
    with pytest.raises(ValueError, match="attends to an image and got none"):
        reader(dataclasses.replace(with_image, image=None), rope)
    assert with_image.image is not None
    with pytest.raises(ValueError, match="the image has 5 tokens and the model 10 positions"):
        reader(dataclasses.replace(with_image, image=with_image.image[:, :5]), rope)
    assert isinstance(with_image.context, Tensor)
    prepared = reader.prepare_text(with_image.context, with_image.image)
    with pytest.raises(ValueError, match="the context is prepared and the stream has an image besides"):
        reader(dataclasses.replace(with_image, context=prepared), rope)


def full_size(**sizes: Any) -> WanTransformerConfig:
    common = {"attention_head_dim": 128, "text_dim": 4096, "freq_dim": 256}
    return WanTransformerConfig(**{**common, "in_channels": 16, "out_channels": 16, **sizes})


_14B = {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40}
_I2V_2_1 = {**_14B, "in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}
SIZES = {
    "2.1 T2V-1.3B": (full_size(num_attention_heads=12, ffn_dim=8960, num_layers=30), 825, 1_418_996_800),
    "T2V-14B": (full_size(**_14B), 1095, 14_288_491_584),
    "2.1 I2V-14B": (full_size(**_I2V_2_1), 1303, 16_394_878_784),
    "2.1 FLF2V-14B": (full_size(**_I2V_2_1, pos_embed_seq_len=514), 1304, 16_394_878_784 + 514 * 1280),
    "2.2 I2V-A14B": (full_size(**_14B, in_channels=36), 1095, 14_288_901_184),
    "2.2 TI2V-5B": (
        full_size(num_attention_heads=24, ffn_dim=14336, num_layers=30, in_channels=48, out_channels=48),
        825,
        4_999_787_712,
    ),
}


@pytest.mark.parametrize("name", SIZES)
def test_full_size_has_the_tensors_and_parameters_of_the_checkpoint(name: str) -> None:
    config, tensors, parameters = SIZES[name]
    with torch.device("meta"):
        model = WanTransformer(dataclasses.replace(config, num_layers=1))
    one = [(name, parameter.numel()) for name, parameter in model.named_parameters()]
    block = [numel for name, numel in one if name.startswith("blocks.0.")]
    more = config.num_layers - 1
    assert len(one) + more * len(block) == tensors
    assert sum(numel for _, numel in one) + more * sum(block) == parameters


def test_full_width_runs_on_meta() -> None:
    # A meta tensor has no value, so a forward that asked the device for one would raise here.
    config = dataclasses.replace(SIZES["2.1 I2V-14B"][0], num_layers=1)
    geometry = Geometry(latent_frames=21, latent_height=90, latent_width=160)
    with torch.device("meta"):
        model = WanTransformer(config).bfloat16().requires_grad_(False)
        stream = Stream(
            latents=torch.empty(2, geometry.video_tokens, 144, dtype=torch.bfloat16),
            timestep=torch.empty(2, 2),
            context=torch.empty(2, 512, 4096, dtype=torch.bfloat16),
            image=torch.empty(2, 257, 1280, dtype=torch.bfloat16),
            rows=torch.empty(2, geometry.video_tokens, dtype=torch.long),
        )
    rope = model.rope_tables(geometry, "meta")
    velocity = model(stream, rope)

    assert rope[0].shape == (1, 1, 75600, 64)
    assert velocity.shape == (2, 75600, 64)
    assert unpatchify(velocity, geometry).shape == (2, 16, 21, 90, 160)
    assert isinstance(stream.context, Tensor)
    prepared = model.prepare_text(stream.context, stream.image)
    assert isinstance(prepared, PreparedContext)
    assert prepared.blocks[0].text.keys.shape == (2, 40, 512, 128)
    assert prepared.blocks[0].image is not None
    assert prepared.blocks[0].image.values.shape == (2, 40, 257, 128)


@pytest.mark.parametrize(("variant", "num_linears"), [("t2v", 10), ("i2v_2_1", 12)])
def test_plan_names_what_the_model_has(variant: str, num_linears: int) -> None:
    model = build(VARIANTS[variant])
    for block in getattr(model, PLAN.blocks):
        attentions = {name for name, module in block.named_modules() if isinstance(module, Attention)}
        assert attentions == {attention.name for attention in PLAN.attentions}
        assert all(getattr(getattr(block, name), PLAN.num_heads) == 2 for name in attentions)
        linears = [name for name, module in block.named_modules() if isinstance(module, nn.Linear)]
        assert len(linears) == num_linears
        assert all(f".{name}".endswith(PLAN.quantizable) for name in linears)


def test_what_stays_in_fp32() -> None:
    model = build(VARIANTS["flf2v"])
    kept = set(diffusers_twin(model)._keep_in_fp32_modules)
    for name, _ in model.named_parameters():
        assert keeps_float32(name, "model") == (not kept.isdisjoint(name.split("."))), name
    official = {name for name, _ in model.named_parameters() if not keeps_float32(name, "fp32")}
    # Autocast rounds what the convolution, the linears of text and image, and those of the blocks read.
    assert all(name.startswith(("patch_embedding", "condition_embedder", "blocks.")) for name in official)
    assert {name.rsplit(".", 2)[-2] for name in official if "blocks" in name} == {
        "to_q", "to_k", "to_v", "0", "add_k_proj", "add_v_proj", "proj", "2",
    }  # fmt: skip
