"""The denoising loop and the serial prediction on a transformer that answers from a table."""

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from vgen.diffusion.guidance import Guidance
from vgen.models.ltx2.geometry import Geometry
from vgen.models.ltx2.perturbation import Perturbation
from vgen.models.ltx2.transformer import LTX2Transformer, Stream
from vgen.stages.condition import Conditions
from vgen.stages.denoise import Conditioning, build_serial_step, denoise
from vgen.stages.latents import Latents
from vgen.stages.passes import plan_passes
from vgen.stages.text import Context

GEOMETRY = Geometry(latent_frames=2, latent_height=1, latent_width=2, fps=24.0, audio_tokens=3)
SIGMAS = torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0])


class Transformer:
    """Velocities that count its calls; remembers what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Stream, Stream | None, Perturbation]] = []
        self.prepared: list[tuple[float, str]] = []

    def prepare_text(self, context: Tensor, modality: str) -> Tensor:
        self.prepared.append((float(context[0, 0, 0]), modality))
        return context

    def rope_tables(self, *_: Any) -> None:
        return None

    def perturbation_plan(self, perturbations: Sequence[Perturbation], _: Any) -> Sequence[Perturbation]:
        return perturbations

    def __call__(
        self, video: Stream, audio: Stream | None, _: Any, perturbations: Sequence[Perturbation]
    ) -> tuple[Tensor, Tensor | None]:
        self.calls.append((video, audio, perturbations[0]))
        number = float(len(self.calls))
        return torch.full_like(video.latents, number), None if audio is None else torch.full_like(
            audio.latents, 10 * number
        )


def context(value: float) -> Context:
    return Context(torch.full((1, 2, 4), value), torch.full((1, 2, 4), value))


def run(
    video: Guidance,
    audio: Guidance | None = None,
    conditions: Conditions | None = None,
    *,
    audio_is_given: bool = False,
) -> tuple[Transformer, list[Latents]]:
    generator = torch.Generator().manual_seed(0)
    latents = Latents(torch.randn(1, 4, 4, generator=generator), None)
    if audio is not None:
        latents = Latents(latents.video, torch.randn(1, 3, 4, generator=generator))
    conditioning = Conditioning(
        GEOMETRY, plan_passes(video, audio, audio_is_given=audio_is_given),
        {"positive": context(1.0), "negative": context(-1.0)}, video, audio or Guidance(), conditions, audio_is_given,
    )  # fmt: skip
    transformer, steps = Transformer(), [latents]
    predict = build_serial_step(cast(LTX2Transformer, transformer), conditioning)
    denoise(predict, latents, SIGMAS, lambda _, after: steps.append(after))
    return transformer, steps


def test_text_is_prepared_once_for_all_steps() -> None:
    transformer, _ = run(Guidance(cfg_scale=3.0), Guidance(cfg_scale=3.0))
    assert sorted(transformer.prepared) == [(-1.0, "audio"), (-1.0, "video"), (1.0, "audio"), (1.0, "video")]
    assert len(transformer.calls) == 8


def test_passes_read_their_text_and_perturbation() -> None:
    guidance = Guidance(3.0, 1.0, 3.0, stg_blocks=(1,))
    transformer, _ = run(guidance, guidance)
    texts = [float(cast(Tensor, video.context)[0, 0, 0]) for video, _, _ in transformer.calls[:4]]
    assert texts == [1.0, -1.0, 1.0, 1.0]
    assert [perturbation for _, _, perturbation in transformer.calls[:4]] == [
        Perturbation(),
        Perturbation(),
        Perturbation(skip_video_self=(1,), skip_audio_self=(1,)),
        Perturbation(skip_audio_to_video="all", skip_video_to_audio="all"),
    ]


def test_both_skip_runs_nothing_and_keeps_the_last_clean_sample() -> None:
    skipping = Guidance(skip_step=1)
    transformer, steps = run(skipping, skipping)
    assert len(transformer.calls) == 2  # of four steps
    # x0 of step 0 is x - 1 * 1; step 1 goes on towards it: a straight line through both steps.
    first, second, third = (steps[i].video for i in range(3))
    torch.testing.assert_close(first - second, second - third)


def test_one_skips_the_other_is_computed_and_the_skipped_stream_is_not_enabled() -> None:
    transformer, steps = run(Guidance(skip_step=1), Guidance())
    assert len(transformer.calls) == 4
    assert [video.enabled for video, _, _ in transformer.calls] == [True, False, True, False]
    assert all(audio is not None and audio.enabled for _, audio, _ in transformer.calls)
    video = [step.video for step in steps]
    torch.testing.assert_close(video[0] - video[1], video[1] - video[2])
    audio = [cast(Tensor, step.audio) for step in steps]
    assert not torch.allclose(audio[0] - audio[1], audio[1] - audio[2])


def test_without_an_audio_stream_the_video_alone_decides() -> None:
    transformer, steps = run(Guidance(skip_step=3), None)
    assert len(transformer.calls) == 1 and transformer.calls[0][1] is None
    assert steps[-1].audio is None


def test_conditioned_tokens_have_their_own_sigma_and_end_as_they_should() -> None:
    mask = torch.tensor([[0.0, 0.0, 1.0, 0.5]])
    clean = torch.arange(16.0).reshape(1, 4, 4)
    levels, rows = torch.tensor([0.0, 0.5, 1.0]), torch.tensor([[0, 0, 2, 1]])
    transformer, steps = run(Guidance(), Guidance(), Conditions(clean, clean, mask, levels, rows))
    video = transformer.calls[1][0]
    torch.testing.assert_close(video.timestep, levels[None] * 0.75, rtol=0, atol=0)
    assert video.rows is rows and float(video.sigma) == 0.75
    audio = transformer.calls[1][1]
    assert audio is not None and audio.timestep.tolist() == [0.75] and audio.rows is None
    torch.testing.assert_close(steps[-1].video[:, :2], clean[:, :2])
    # Velocity 4 at the last step, sigma 0.25 and half of it for the token in between.
    before, after = steps[-2].video, steps[-1].video
    torch.testing.assert_close(after[:, 2], before[:, 2] - 0.25 * 4)
    torch.testing.assert_close(after[:, 3], 0.5 * (before[:, 3] - 0.125 * 4) + 0.5 * clean[:, 3])


def test_a_given_sound_stays_and_has_no_noise() -> None:
    transformer, steps = run(Guidance(cfg_scale=3.0), Guidance(), audio_is_given=True)
    assert len(transformer.calls) == 8
    for _, audio, _ in transformer.calls:
        assert audio is not None and audio.enabled
        assert float(audio.sigma) == float(audio.timestep) == 0.0
        assert float(cast(Tensor, audio.context)[0, 0, 0]) == 1.0
    assert all(torch.equal(cast(Tensor, step.audio), cast(Tensor, steps[0].audio)) for step in steps)


@pytest.mark.parametrize("scales", [(3.0, 1.0, 3.0), (1.0, 0.0, 3.0)])
def test_modality_guidance_without_audio_changes_nothing(scales: tuple[float, float, float]) -> None:
    alone = Guidance(*scales, rescale_scale=0.5, stg_blocks=(0,))
    without = Guidance(*scales[:2], rescale_scale=0.5, stg_blocks=(0,))
    assert torch.equal(run(alone, None)[1][-1].video, run(without, None)[1][-1].video)
