"""The text connectors against diffusers with shared random weights, and the order of their tokens."""

import dataclasses

import pytest
import torch
from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors, per_layer_masked_mean_norm, per_token_rms_norm
from torch import Tensor, nn

from vgen.models.ltx2.config import ConnectorConfig
from vgen.models.ltx2.connectors import (
    Connector,
    TextConnectors,
    TextProjectionPerModality,
    normalise_states,
    rms_normalise_states,
    valid_first,
)

HIDDEN, STATES, REGISTERS, LENGTH = 24, 3, 8, 16
TINY = ConnectorConfig(
    num_layers=2,
    num_attention_heads=2,
    attention_head_dim=12,
    num_registers=REGISTERS,
    rope_max_pos=4096.0,
    rope_theta=10000.0,
    rope_float64=True,
    norm_eps=1e-6,
)
FULL_SIZE = ConnectorConfig(
    num_layers=2,
    num_attention_heads=30,
    attention_head_dim=128,
    num_registers=128,
    rope_max_pos=4096.0,
    rope_theta=10000.0,
    rope_float64=True,
    norm_eps=1e-6,
)
TINY_2_3 = (
    dataclasses.replace(TINY, num_layers=3, attention_head_dim=16, gated_attention=True),
    dataclasses.replace(TINY, num_layers=3, attention_head_dim=8, gated_attention=True),
)
FULL_SIZE_2_3 = (
    dataclasses.replace(FULL_SIZE, num_layers=8, num_attention_heads=32, gated_attention=True),
    dataclasses.replace(FULL_SIZE, num_layers=8, num_attention_heads=32, attention_head_dim=64, gated_attention=True),
)
VERSIONS = ["2.0", "2.3"]
RENAMED = {
    "text_proj_in": "text_embedding_projection.aggregate_embed",
    "video_text_proj_in": "text_embedding_projection.video_aggregate_embed",
    "audio_text_proj_in": "text_embedding_projection.audio_aggregate_embed",
    "video_connector": "video_embeddings_connector",
    "audio_connector": "audio_embeddings_connector",
    "transformer_blocks": "transformer_1d_blocks",
    "norm_q": "q_norm",
    "norm_k": "k_norm",
}


def randomise(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            parameter.data = 1 + 0.3 * noise
        elif "registers" in name or parameter.ndim == 1:
            parameter.data = 0.5 * noise
        else:
            parameter.data = noise / parameter.shape[1] ** 0.5


def build(version: str = "2.0") -> TextConnectors:
    with torch.device("meta"):
        if version == "2.0":
            model = TextConnectors(TINY, TINY, HIDDEN, STATES)
        else:
            model = TextConnectors(*TINY_2_3, HIDDEN, STATES, text_projection="per_modality")
    model.to_empty(device="cpu")
    randomise(model)
    return model.requires_grad_(False)


def build_pair(version: str = "2.0") -> tuple[TextConnectors, LTX2TextConnectors]:
    ours = build(version)
    video, audio = ours.video_embeddings_connector.config, ours.audio_embeddings_connector.config
    theirs = LTX2TextConnectors(
        caption_channels=HIDDEN,
        text_proj_in_factor=STATES,
        video_connector_num_attention_heads=video.num_attention_heads,
        video_connector_attention_head_dim=video.attention_head_dim,
        video_connector_num_layers=video.num_layers,
        video_connector_num_learnable_registers=REGISTERS,
        video_gated_attn=video.gated_attention,
        audio_connector_num_attention_heads=audio.num_attention_heads,
        audio_connector_attention_head_dim=audio.attention_head_dim,
        audio_connector_num_layers=audio.num_layers,
        audio_connector_num_learnable_registers=REGISTERS,
        audio_gated_attn=audio.gated_attention,
        connector_rope_base_seq_len=4096,
        rope_type="split",
        per_modality_projections=version == "2.3",
        video_hidden_dim=video.width,
        audio_hidden_dim=audio.width,
        proj_bias=version == "2.3",
    )
    state = ours.state_dict()
    names = {name: ".".join(RENAMED.get(part, part) for part in name.split(".")) for name in theirs.state_dict()}
    assert sorted(names.values()) == sorted(state)
    theirs.load_state_dict({name: state[ours_name] for name, ours_name in names.items()})
    return ours, theirs.requires_grad_(False)


def make_states(length: int, batch: int) -> Tensor:
    # Far from centred and of unlike spread, as Gemma's are.
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(batch, length, HIDDEN, STATES, generator=generator)
    return noise * torch.tensor([0.1, 5.0, 40.0]) + torch.tensor([3.0, -1.0, 20.0])


def left_padded(lengths: list[int], length: int) -> Tensor:
    return torch.tensor([[0] * (length - valid) + [1] * valid for valid in lengths])


def relative_error(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("length", "lengths"), [(8, [3]), (16, [1]), (16, [5, 11]), (16, [16]), (32, [32, 3]), (32, [16, 31, 8, 9])]
)
def test_equal_diffusers(length: int, lengths: list[int], version: str) -> None:
    ours, theirs = build_pair(version)
    states, mask = make_states(length, len(lengths)), left_padded(lengths, length)

    video, audio = ours(states, mask)
    expected_video, expected_audio, _ = theirs(states, mask)

    assert relative_error(video, expected_video) <= 1e-6
    assert relative_error(audio, expected_audio) <= 1e-6
    if version == "2.0":
        assert relative_error(video, audio) > 0.1  # the two connectors are different ones
    else:
        assert (video.shape[2], audio.shape[2]) == (32, 16)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_sequence_of_states_equals_the_stack(version: str) -> None:
    model = build(version)
    states, mask = make_states(LENGTH, 2), left_padded([5, 11], LENGTH)
    stacked, listed = model(states, mask), model(states.unbind(-1), mask)
    assert torch.equal(stacked[0], listed[0])
    assert torch.equal(stacked[1], listed[1])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("mask_dtype", [torch.long, torch.int32, torch.bool])
def test_mask_dtypes_agree(mask_dtype: torch.dtype, version: str) -> None:
    model = build(version)
    states, mask = make_states(LENGTH, 2), left_padded([5, 11], LENGTH)
    assert torch.equal(model(states, mask)[0], model(states, mask.to(mask_dtype))[0])


def test_normalisation_by_hand() -> None:
    states, mask = make_states(LENGTH, 2).double(), left_padded([5, 11], LENGTH)
    out = normalise_states(states, mask).unflatten(-1, (HIDDEN, STATES))
    assert out[0, :11].abs().max() == 0
    for item, valid in enumerate((5, 11)):
        for state in range(STATES):
            x = states[item, LENGTH - valid :, :, state]
            expected = 8 * (x - x.mean()) / (x.max() - x.min() + 1e-6)
            torch.testing.assert_close(out[item, LENGTH - valid :, :, state], expected, rtol=1e-6, atol=1e-6)


def test_rms_normalisation_by_hand() -> None:
    states, mask = make_states(LENGTH, 2).double(), left_padded([5, 11], LENGTH)
    out = rms_normalise_states(states, mask)
    assert out[0, :11].abs().max() == 0
    for channel, state, sample, token in [(0, 0, 0, 12), (7, 2, 1, 5), (23, 1, 1, 15)]:
        x = states[sample, token, :, state]
        expected = x[channel] / (x.square().mean() + 1e-6).sqrt()
        torch.testing.assert_close(out[sample, token, channel * STATES + state], expected, rtol=1e-12, atol=0)


def test_each_projection_is_scaled_to_its_own_width() -> None:
    model = build("2.3").text_embedding_projection
    assert isinstance(model, TextProjectionPerModality)
    states, mask = make_states(LENGTH, 2), left_padded([5, 11], LENGTH)
    normed = rms_normalise_states(states, mask)
    for features, linear, width in zip(
        model(states, mask), (model.video_aggregate_embed, model.audio_aggregate_embed), (32, 16), strict=True
    ):
        expected = (normed @ linear.weight.T) * (width / HIDDEN) ** 0.5 + linear.bias
        torch.testing.assert_close(features, expected, rtol=0, atol=1e-5)


def test_rms_normalisation_in_bf16_rounds_where_diffusers_rounds() -> None:
    states, mask = make_states(LENGTH, 2).bfloat16(), left_padded([5, 11], LENGTH)
    out = rms_normalise_states(states, mask)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, per_token_rms_norm(states).flatten(2) * mask.unsqueeze(-1).bfloat16())


def test_normalisation_in_bf16_rounds_where_diffusers_rounds() -> None:
    states, mask = make_states(LENGTH, 2).bfloat16(), left_padded([5, 11], LENGTH)
    out = normalise_states(states, mask)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, per_layer_masked_mean_norm(states, mask.sum(-1), "cpu"))


@pytest.mark.parametrize("version", VERSIONS)
def test_padding_content_does_not_matter(version: str) -> None:
    model = build(version)
    states, mask = make_states(LENGTH, 2), left_padded([5, 11], LENGTH)
    disturbed = torch.where(mask.bool()[:, :, None, None], states, 1e4)
    assert torch.equal(model(states, mask)[0], model(disturbed, mask)[0])
    assert torch.equal(model(states, mask)[1], model(disturbed, mask)[1])


@pytest.mark.parametrize("version", VERSIONS)
def test_padding_side_does_not_matter(version: str) -> None:
    model = build(version)
    states = make_states(LENGTH, 1)
    left = model(states, left_padded([5], LENGTH))
    rolled = torch.roll(states, 5, dims=1)
    right = model(rolled, torch.tensor([[1] * 5 + [0] * 11]))
    assert relative_error(right[0], left[0]) <= 1e-6
    assert relative_error(right[1], left[1]) <= 1e-6


def test_tokens_keep_their_order_and_registers_their_position() -> None:
    """What the blocks see: valid tokens first and in order, then registers by absolute position, twice around."""
    with torch.device("meta"):
        connector = Connector(TINY)
    connector.to_empty(device="cpu")
    randomise(connector)
    seen: list[Tensor] = []
    connector.transformer_1d_blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    features = torch.arange(2 * LENGTH * TINY.width, dtype=torch.float32).view(2, LENGTH, TINY.width) + 100
    mask = torch.tensor([[0] * 11 + [1] * 5, [0, 1, 1, 0, 0, 1] + [0] * 9 + [1]])

    ordered, valid = valid_first(features, mask)
    connector(ordered, valid)

    assert valid.tolist() == [[True] * 5 + [False] * 11, [True] * 4 + [False] * 12]
    assert torch.equal(seen[0][0, :5], features[0, 11:])
    assert torch.equal(seen[0][1, :4], features[1, [1, 2, 5, 15]])
    for item, count in enumerate((5, 4)):
        for position in range(count, LENGTH):
            assert torch.equal(seen[0][item, position], connector.learnable_registers[position % REGISTERS])


def test_text_length_must_fit_the_registers() -> None:
    model = build()
    with pytest.raises(ValueError, match=r"the text has 20 tokens.*multiple of its 8 registers: pad the prompt to 24"):
        model(make_states(20, 1), left_padded([5], 20))


def test_position_tables_are_kept() -> None:
    connector = build().video_embeddings_connector
    first = connector._rope(LENGTH, torch.device("cpu"), torch.float32)
    assert connector._rope(LENGTH, torch.device("cpu"), torch.float32)[0] is first[0]
    for length in range(8, 56, 8):
        connector._rope(length, torch.device("cpu"), torch.float32)
    assert len(connector._rope_cache) == 4


def test_shared_projection_needs_equal_widths() -> None:
    with pytest.raises(ValueError, match=r"32 \(video\) and 16 \(audio\) wide .* text_projection=per_modality"):
        TextConnectors(*TINY_2_3, HIDDEN, STATES)


FULL_SIZES = {
    "2.0": ((FULL_SIZE, FULL_SIZE), "shared", (3840, 3840), 0.709e9, {"aggregate_embed.weight": (3840, 188160)}),
    "2.3": (
        FULL_SIZE_2_3,
        "per_modality",
        (4096, 2048),
        2.016e9,
        {
            "video_aggregate_embed.weight": (4096, 188160),
            "video_aggregate_embed.bias": (4096,),
            "audio_aggregate_embed.weight": (2048, 188160),
            "audio_aggregate_embed.bias": (2048,),
        },
    ),
}


@pytest.mark.parametrize("version", FULL_SIZES)
def test_full_size_builds_and_runs_on_meta(version: str) -> None:
    configs, text_projection, widths, num_parameters, projection = FULL_SIZES[version]
    with torch.device("meta"):
        model = TextConnectors(*configs, hidden_size=3840, num_states=49, text_projection=text_projection).bfloat16()
        states = [torch.empty(2, 1024, 3840, dtype=torch.bfloat16) for _ in range(49)]
        mask = torch.empty(2, 1024, dtype=torch.long)
    connectors = {name: p for name, p in model.state_dict().items() if "connector" in name}
    # Per block 14 tensors, with gates 16, and the registers.
    assert len(connectors) == {"2.0": 2 * (2 * 14 + 1), "2.3": 2 * (8 * 16 + 1)}[version]
    assert sum(p.numel() for p in connectors.values()) == pytest.approx(num_parameters, abs=0.5e6)
    assert {name: tuple(p.shape) for name, p in model.text_embedding_projection.state_dict().items()} == projection
    assert len(model.state_dict()) == len(connectors) + len(projection)
    with torch.no_grad():
        video, audio = model(states, mask)
    assert (video.shape, audio.shape) == tuple((2, 1024, width) for width in widths)
    assert video.dtype == audio.dtype == torch.bfloat16
