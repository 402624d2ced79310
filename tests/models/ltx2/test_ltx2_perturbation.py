"""What guidance passes leave out, for both versions: against the official semantics by hand, and against diffusers."""

import dataclasses
from typing import Any

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
    item,
    make_streams,
    per_token,
    relative_error,
    run_diffusers,
    run_ours,
    tiny_config,
)
from vgen.models.attention import Attention, sdpa
from vgen.models.ltx2.perturbation import BlockKeep, Perturbation, plan_perturbations
from vgen.models.ltx2.transformer import LTX2Transformer, Stream

NOTHING = Perturbation()
ISOLATED = Perturbation(skip_audio_to_video="all", skip_video_to_audio="all")
VERSIONS = ["2.0", "2.3"]


def stg(blocks: tuple[int, ...]) -> Perturbation:
    return Perturbation(skip_video_self=blocks, skip_audio_self=blocks)


PERTURBATIONS = {
    "STG on one block": stg((1,)),
    "STG on several blocks": stg((0, 2)),
    "STG on every block": Perturbation(skip_video_self="all", skip_audio_self="all"),
    "STG of the video": Perturbation(skip_video_self=(1,)),
    "STG of the audio": Perturbation(skip_audio_self=(0, 1)),
    "STG on unlike blocks": Perturbation(skip_video_self=(0, 1), skip_audio_self=(2,)),
    "isolated": ISOLATED,
    "no audio to video": Perturbation(skip_audio_to_video="all"),
    "no video to audio in one block": Perturbation(skip_video_to_audio=(1,)),
    "everything": Perturbation("all", (1,), (0, 2), "all"),
}


def three_blocks(version: str) -> Any:
    return tiny_config(version, num_layers=3)


def spread_streams(config: Any) -> tuple[Stream, Stream]:
    """Streams whose tokens and modalities have different timesteps, so that nothing is right by coincidence."""
    timesteps = per_token(SIGMA, GEOMETRY.video_tokens, 1), per_token(OTHER_SIGMA, GEOMETRY.audio_tokens, 2)
    return make_streams(config, *timesteps, video_sigma=SIGMA, audio_sigma=OTHER_SIGMA)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("case", PERTURBATIONS)
def test_equals_the_official_semantics_and_means_something(version: str, case: str) -> None:
    # Of 2.0 too: diffusers ignores spatio-temporal guidance there, which costs a pass and guides nothing.
    config = three_blocks(version)
    model, (video, audio) = build(config), spread_streams(config)
    perturbations = (PERTURBATIONS[case],) * len(SIGMA)

    actual = run_ours(model, video, audio, perturbations)
    expected = by_hand(model, video, audio, perturbations)
    plain = run_ours(model, video, audio)

    for index in (0, 1):
        assert relative_error(actual[index], expected[index]) <= TOLERANCE
        assert relative_error(actual[index], plain[index]) > 1e-3


@pytest.mark.parametrize("blocks", [(1,), (0, 2), (0, 1, 2)])
def test_stg_of_2_3_equals_diffusers(blocks: tuple[int, ...]) -> None:
    config = three_blocks("2.3")
    ours, theirs = build_pair(config)
    video, audio = make_streams(config, SIGMA, SIGMA)

    actual = run_ours(ours, video, audio, (stg(blocks),) * len(SIGMA))
    expected = run_diffusers(theirs, video, audio, spatio_temporal_guidance_blocks=list(blocks))

    assert relative_error(actual[0], expected[0]) <= TOLERANCE
    assert relative_error(actual[1], expected[1]) <= TOLERANCE


def test_stg_of_2_0_equals_diffusers_once_it_is_told_to_perturb() -> None:
    """Its class can: only the published 2.0 config has ``perturbed_attn`` false, which makes it ignore the blocks."""
    from diffusers.models.transformers.transformer_ltx2 import LTX2PerturbedAttnProcessor

    config = three_blocks("2.0")
    ours, theirs = build_pair(config)
    video, audio = make_streams(config, SIGMA, SIGMA)
    plain = run_diffusers(theirs, video, audio)
    ignored = run_diffusers(theirs, video, audio, spatio_temporal_guidance_blocks=[1])
    assert torch.equal(ignored[0], plain[0])

    for block in theirs.transformer_blocks:
        block.perturbed_attn = True
        block.attn1.set_processor(LTX2PerturbedAttnProcessor())
        block.audio_attn1.set_processor(LTX2PerturbedAttnProcessor())
    expected = run_diffusers(theirs, video, audio, spatio_temporal_guidance_blocks=[1])
    actual = run_ours(ours, video, audio, (stg((1,)),) * len(SIGMA))

    assert relative_error(actual[0], expected[0]) <= TOLERANCE
    assert relative_error(actual[1], expected[1]) <= TOLERANCE
    assert relative_error(actual[0], plain[0]) > 1e-3


@pytest.mark.parametrize("version", VERSIONS)
def test_isolation_equals_diffusers_and_each_stream_alone(version: str) -> None:
    config = three_blocks(version)
    ours, theirs = build_pair(config)
    video, audio = spread_streams(config)

    actual = run_ours(ours, video, audio, (ISOLATED,) * len(SIGMA))
    expected = run_diffusers(theirs, video, audio, isolate_modalities=True)

    assert relative_error(actual[0], expected[0]) <= TOLERANCE
    assert relative_error(actual[1], expected[1]) <= TOLERANCE
    assert torch.equal(actual[0], run_ours(ours, video, None)[0])
    assert torch.equal(actual[1], run_ours(ours, None, audio)[1])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("stream", ["video", "audio"])
def test_stg_of_one_stream_alone(version: str, stream: str) -> None:
    config = three_blocks(version)
    model, (video, audio) = build(config), spread_streams(config)
    streams = (video, None) if stream == "video" else (None, audio)
    index = 0 if stream == "video" else 1

    actual = run_ours(model, *streams, (stg((1,)), NOTHING))
    expected = by_hand(model, *streams, (stg((1,)), NOTHING))

    assert actual[1 - index] is None
    assert relative_error(actual[index], expected[index]) <= TOLERANCE


@pytest.mark.parametrize("version", VERSIONS)
def test_a_mixed_batch_equals_its_samples_one_by_one(version: str) -> None:
    """Conditional, unconditional (other text), perturbed and isolated: the four passes of one guided step at once."""
    config = three_blocks(version)
    model = build(config)
    sigma = torch.full((4,), 0.725)
    timesteps = per_token(sigma, GEOMETRY.video_tokens, 1), sigma
    video, audio = make_streams(config, *timesteps, video_sigma=sigma, audio_sigma=sigma)
    unlike_blocks = Perturbation(skip_video_self=(0, 1), skip_audio_self=(1,))
    passes = (NOTHING, NOTHING, unlike_blocks, ISOLATED)

    together = run_ours(model, video, audio, passes)
    expected = by_hand(model, video, audio, passes)

    for sample, perturbation in enumerate(passes):
        alone = run_ours(model, item(video, sample), item(audio, sample), (perturbation,))
        for index in (0, 1):
            assert relative_error(together[index][sample], alone[index][0]) <= TOLERANCE
            assert relative_error(together[index][sample], expected[index][sample]) <= TOLERANCE


@pytest.mark.parametrize("version", VERSIONS)
def test_no_perturbation_changes_no_bit(version: str) -> None:
    config = three_blocks(version)
    model, (video, audio) = build(config), spread_streams(config)
    plain = run_ours(model, video, audio)
    named = run_ours(model, video, audio, (NOTHING, NOTHING))
    blended = run_ours(model, video, audio, (NOTHING, Perturbation("all", "all", "all", "all")))
    for index in (0, 1):
        assert torch.equal(plain[index], named[index])
        # The masks of a mixed batch select; they round nothing.
        assert torch.equal(plain[index][0], blended[index][0])


def record_calls(model: LTX2Transformer) -> tuple[list[str], list[str]]:
    """Names of the modules that run, and of the attentions whose kernel is called, as ``block.name``."""
    ran: list[str] = []
    attended: list[str] = []
    for number, block in enumerate(model.transformer_blocks):
        for name, module in block.named_modules():
            if isinstance(module, Attention):

                def attend(
                    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, at: str = f"{number}.{name}"
                ) -> Tensor:
                    assert mask is None
                    attended.append(at)
                    return sdpa(q, k, v, mask)

                module.attend = attend
            module.register_forward_hook(lambda *_, at=f"{number}.{name}": ran.append(at))
    return ran, attended


def test_what_all_samples_leave_out_does_not_run() -> None:
    config = three_blocks("2.3")
    model, (video, audio) = build(config), spread_streams(config)
    ran, attended = record_calls(model)
    perturbation = Perturbation(skip_video_self=(1,), skip_audio_self=(2,), skip_video_to_audio=(0,))

    run_ours(model, video, audio, (perturbation, perturbation))

    left_out = {"1.attn1", "2.audio_attn1", "0.video_to_audio_attn"}
    every = {f"{block}.{name}" for block in range(3) for name, m in model.transformer_blocks[0].named_children()}
    attentions = {at for at in every if "attn" in at}
    assert set(attended) == attentions - left_out
    assert "0.video_to_audio_attn" not in ran
    for bypassed in ("1.attn1", "2.audio_attn1"):
        parts = {at.removeprefix(f"{bypassed}.") for at in ran if at.startswith(f"{bypassed}.")}
        assert parts == {"to_v", "to_gate_logits", "to_out.0"}

    attended.clear()
    run_ours(model, video, audio, (perturbation, NOTHING))
    assert set(attended) == attentions


def test_a_bypass_works_on_a_shard_of_the_tokens() -> None:
    """Sequence parallelism replaces ``attend``: what goes around it must be local to a token."""
    with torch.no_grad():
        module = build(three_blocks("2.3")).transformer_blocks[0].attn1
        x = torch.randn(2, 18, 64, generator=torch.Generator().manual_seed(0))
        for keep in (False, torch.tensor([True, False])[:, None, None]):
            whole = module(x, keep=keep)
            attended: list[Tensor] = []
            module.attend = lambda q, k, v, mask, attended=attended: attended.append(sdpa(q, k, v)) or attended[-1]
            module(x, keep=keep)
            for part in (slice(0, 6), slice(6, 18)):
                module.attend = lambda q, k, v, mask, part=part, attended=attended: attended[-1][:, :, part]
                torch.testing.assert_close(module(x[:, part], keep=keep), whole[:, part], rtol=0, atol=1e-6)
            module.attend = sdpa


def flags(keep: BlockKeep) -> list[Any]:
    return [
        value.flatten().tolist() if isinstance(value, Tensor) else value
        for value in (keep.video_self, keep.audio_self, keep.audio_to_video, keep.video_to_audio)
    ]


def test_plan_of_a_batch() -> None:
    samples = (Perturbation(skip_video_self=(1,), skip_video_to_audio="all"), Perturbation((1,), (0,), (), (0,)))
    plan = plan_perturbations(samples, 3, "cpu")
    assert plan.num_samples == 2
    assert [flags(keep) for keep in plan.blocks] == [
        [True, [True, False], True, False],
        [False, True, True, [False, True]],
        [True, True, True, [False, True]],
    ]
    assert plan.blocks[0].audio_self.shape == (2, 1, 1)
    assert plan.blocks[0].audio_self.dtype == torch.bool


def test_plan_of_nothing() -> None:
    for samples, number in (((), None), ((NOTHING,) * 3, 3)):
        plan = plan_perturbations(samples, 2, "cpu")
        assert plan.num_samples == number
        assert [flags(keep) for keep in plan.blocks] == [[True] * 4] * 2


def test_plan_is_kept_and_can_be_passed() -> None:
    config = three_blocks("2.0")
    model, (video, audio) = build(config), spread_streams(config)
    samples = (stg((1,)), NOTHING)
    plan = model.perturbation_plan(samples, "cpu")
    assert model.perturbation_plan([stg((1,)), NOTHING], torch.device("cpu")) is plan
    rope = model.rope_tables(GEOMETRY, "cpu", torch.float32)
    with torch.no_grad():
        passed = model(video, audio, rope, plan)
    assert torch.equal(passed[0], run_ours(model, video, audio, samples)[0])


def test_a_perturbation_is_a_value() -> None:
    assert Perturbation((1,)) == Perturbation(skip_video_self=(1,))
    assert len({NOTHING, Perturbation(), stg((1,)), stg((1,)), ISOLATED}) == 3


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Perturbation)])
def test_unknown_blocks_and_wrong_numbers_of_samples_are_refused(field: str) -> None:
    for block in (3, -1):
        with pytest.raises(ValueError, match=rf"{field} names block {block} .* has 3 blocks; choose from 0 to 2"):
            plan_perturbations((NOTHING, Perturbation(**{field: (0, block)})), 3, "cpu")
    config = three_blocks("2.0")
    model, (video, audio) = build(config), spread_streams(config)
    with pytest.raises(ValueError, match="the batch has 2 samples and 1 perturbations; give one per sample"):
        run_ours(model, video, audio, (Perturbation(**{field: (0,)}),))
