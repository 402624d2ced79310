"""The 2.3 transformer, which is the 2.0 one with other switches: gated attention and text that the noise modulates."""

import dataclasses

import pytest
import torch
from torch import Tensor

from tests.models.ltx2.transformer_oracle import (
    GEOMETRY,
    OTHER_SIGMA,
    SIGMA,
    TOLERANCE,
    build,
    build_pair,
    by_hand,
    make_streams,
    per_token,
    relative_error,
    run_diffusers,
    run_ours,
    tiny_config,
)

VIDEO_TIMESTEP = per_token(SIGMA, GEOMETRY.video_tokens, 1)
AUDIO_TIMESTEP = per_token(OTHER_SIGMA, GEOMETRY.audio_tokens, 2)


@pytest.mark.parametrize("num_heads", [2, 4])
@pytest.mark.parametrize("use_cross_timestep", [False, True])
def test_text_to_video_equals_diffusers(num_heads: int, use_cross_timestep: bool) -> None:
    config = tiny_config("2.3", num_heads)
    ours, theirs = build_pair(config)
    video, audio = make_streams(config, SIGMA, SIGMA)

    actual = run_ours(ours, video, audio)
    expected = run_diffusers(theirs, video, audio, use_cross_timestep=use_cross_timestep)

    assert relative_error(actual[0], expected[0]) <= TOLERANCE
    assert relative_error(actual[1], expected[1]) <= TOLERANCE


@pytest.mark.parametrize("case", ["different scalars", "per-token video", "per-token both", "frozen audio"])
def test_equals_the_official_maths_where_timesteps_differ(case: str) -> None:
    timesteps = {
        "different scalars": (SIGMA, OTHER_SIGMA),
        "per-token video": (VIDEO_TIMESTEP, SIGMA),
        "per-token both": (VIDEO_TIMESTEP, AUDIO_TIMESTEP),
        "frozen audio": (SIGMA, torch.zeros_like(AUDIO_TIMESTEP)),
    }
    config = tiny_config("2.3", num_heads=4, av_timestep_scale_multiplier=250)
    model = build(config)
    video, audio = make_streams(config, *timesteps[case], video_sigma=SIGMA, audio_sigma=OTHER_SIGMA)

    actual, expected = run_ours(model, video, audio), by_hand(model, video, audio)

    assert relative_error(actual[0], expected[0]) <= TOLERANCE
    assert relative_error(actual[1], expected[1]) <= TOLERANCE


def test_the_maths_by_hand_equals_diffusers() -> None:
    """The oracle of the other tests, where diffusers knows the answer too."""
    for version in ("2.0", "2.3"):
        config = tiny_config(version)
        ours, theirs = build_pair(config)
        video, audio = make_streams(config, SIGMA, SIGMA)
        by_diffusers, expected = run_diffusers(theirs, video, audio), by_hand(ours, video, audio)
        assert relative_error(by_diffusers[0], expected[0]) <= TOLERANCE
        assert relative_error(by_diffusers[1], expected[1]) <= TOLERANCE


@pytest.mark.parametrize("stream", ["video", "audio"])
def test_one_stream_alone_equals_diffusers(stream: str) -> None:
    config = tiny_config("2.3")
    ours, theirs = build_pair(config)
    video, audio = make_streams(config, VIDEO_TIMESTEP, AUDIO_TIMESTEP, video_sigma=SIGMA, audio_sigma=OTHER_SIGMA)
    expected = run_diffusers(theirs, video, audio, isolate_modalities=True)
    index = 0 if stream == "video" else 1

    actual = run_ours(ours, *((video, None) if stream == "video" else (None, audio)))

    assert actual[1 - index] is None
    assert relative_error(actual[index], expected[index]) <= TOLERANCE


@pytest.mark.parametrize("modality", ["video", "audio"])
def test_text_follows_the_sigma_of_its_stream_and_not_its_timesteps(modality: str) -> None:
    """What text attention reads changes with sigma alone, so its keys and values cannot be kept from step to step."""
    config = tiny_config("2.3")
    model = build(config)
    index, prefix = (0, "") if modality == "video" else (1, "audio_")
    seen: list[Tensor] = []
    attention = model.transformer_blocks[0].get_submodule(f"{prefix}attn2")
    attention.register_forward_pre_hook(lambda _, args: seen.append(args[1]))

    def text(timestep: Tensor, sigma: Tensor) -> Tensor:
        sigmas = {"video_sigma": SIGMA, "audio_sigma": SIGMA, f"{modality}_sigma": sigma}
        streams = make_streams(config, *(timestep if at == index else SIGMA for at in (0, 1)), **sigmas)
        run_ours(model, *streams)
        return seen.pop()

    assert torch.equal(text(SIGMA, SIGMA), text(OTHER_SIGMA, SIGMA))
    assert relative_error(text(SIGMA, SIGMA), text(SIGMA, OTHER_SIGMA)) > 1e-2


def test_gates_act_in_all_six_attentions_and_in_all_heads() -> None:
    config = tiny_config("2.3", num_layers=1)
    model = build(config)
    streams = make_streams(config, SIGMA, OTHER_SIGMA)
    plain = run_ours(model, *streams)
    names = ["attn1", "attn2", "audio_attn1", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn"]
    for name in names:
        for head in range(config.num_attention_heads):
            bias = model.transformer_blocks[0].get_submodule(name).to_gate_logits.bias
            kept = bias.clone()
            bias[head] += 1.0
            changed = run_ours(model, *streams)
            bias.copy_(kept)
            index = 1 if name.startswith("audio_attn") or name == "video_to_audio_attn" else 0
            assert relative_error(changed[index], plain[index]) > 1e-3


def test_the_names_of_2_3_are_those_of_2_0_and_these() -> None:
    old, new = build(tiny_config("2.0")).state_dict(), build(tiny_config("2.3")).state_dict()
    removed = {name for name in old if name not in new}
    added = {name.split("transformer_blocks.")[-1] for name in new if name not in old}
    linear, embedder = (
        ("weight", "bias"),
        ("emb.timestep_embedder.linear_1", "emb.timestep_embedder.linear_2", "linear"),
    )
    attentions = ["attn1", "attn2", "audio_attn1", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn"]
    assert removed == {
        f"{prefix}caption_projection.linear_{number}.{end}"
        for prefix in ("", "audio_")
        for number in (1, 2)
        for end in linear
    }
    assert added == {
        *(f"{p}prompt_adaln_single.{part}.{end}" for p in ("", "audio_") for part in embedder for end in linear),
        *(f"{block}.{name}.to_gate_logits.{end}" for block in (0, 1) for name in attentions for end in linear),
        *(f"{block}.{prefix}prompt_scale_shift_table" for block in (0, 1) for prefix in ("", "audio_")),
    }
    changed = {name: tuple(new[name].shape) for name in new if name in old and new[name].shape != old[name].shape}
    assert {name: shape[0] for name, shape in changed.items() if "transformer_blocks" in name} == {
        f"transformer_blocks.{block}.{prefix}scale_shift_table": 9 for block in (0, 1) for prefix in ("", "audio_")
    }
    assert changed["adaln_single.linear.weight"] == (9 * 64, 64)
    assert changed["audio_adaln_single.linear.bias"] == (9 * 32,)


@pytest.mark.parametrize(
    "switches",
    [{"gated_attention": True}, {"cross_attention_adaln": True}, {"caption_projection": False}],
    ids=lambda switches: next(iter(switches)),
)
def test_each_switch_stands_alone(switches: dict[str, bool]) -> None:
    config = tiny_config("2.0", **switches)
    model = build(config)
    video, audio = make_streams(config, VIDEO_TIMESTEP, AUDIO_TIMESTEP, video_sigma=SIGMA, audio_sigma=OTHER_SIGMA)

    actual, expected = run_ours(model, video, audio), by_hand(model, video, audio)
    with torch.no_grad():
        video = dataclasses.replace(video, context=model.prepare_text(video.context, "video"))
        audio = dataclasses.replace(audio, context=model.prepare_text(audio.context, "audio"))
    prepared = run_ours(model, video, audio)

    for index in (0, 1):
        assert relative_error(actual[index], expected[index]) <= TOLERANCE
        assert torch.equal(prepared[index], actual[index])
