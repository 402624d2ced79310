"""Which passes run when: the table of docs/guidance.md, and the official rules behind it."""

import itertools

import pytest

from vgen.diffusion.guidance import Guidance
from vgen.models.ltx2.perturbation import Perturbation
from vgen.stages.passes import COND, needs_negative, plan_passes

SCALES = list(itertools.product((1.0, 3.0), (0.0, 1.0), (1.0, 3.0)))


def stream(scales: tuple[float, float, float], blocks: tuple[int, ...]) -> Guidance:
    return Guidance(*scales, rescale_scale=0.7, stg_blocks=blocks)


@pytest.mark.parametrize(("video", "audio"), list(itertools.product(SCALES, SCALES)))
def test_every_combination_of_scales(video: tuple[float, float, float], audio: tuple[float, float, float]) -> None:
    passes = {one.name: one for one in plan_passes(stream(video, (1, 2)), stream(audio, (3,)))}
    assert next(iter(passes)) == "cond" and passes["cond"].perturbation == Perturbation()
    assert ("uncond" in passes) == (video[0] != 1 or audio[0] != 1)
    assert ("ptb" in passes) == (video[1] != 0 or audio[1] != 0)
    assert ("mod" in passes) == (video[2] != 1 or audio[2] != 1)
    if "uncond" in passes:
        assert (passes["uncond"].video_text, passes["uncond"].audio_text) == ("negative", "negative")
        assert passes["uncond"].perturbation == Perturbation()
    if "ptb" in passes:
        assert passes["ptb"].perturbation == Perturbation(
            skip_video_self=(1, 2) if video[1] else (), skip_audio_self=(3,) if audio[1] else ()
        )
    if "mod" in passes:
        assert passes["mod"].perturbation == Perturbation(skip_audio_to_video="all", skip_video_to_audio="all")
    assert all(one.video_text == "positive" for name, one in passes.items() if name != "uncond")
    assert needs_negative(tuple(passes.values())) == ("uncond" in passes)


def test_order_is_the_official_one() -> None:
    everything = stream((3.0, 1.0, 3.0), (0,))
    assert [one.name for one in plan_passes(everything, everything)] == ["cond", "uncond", "ptb", "mod"]


def test_without_audio_there_is_nothing_to_isolate() -> None:
    passes = plan_passes(stream((3.0, 1.0, 3.0), (0,)), None)
    assert [one.name for one in passes] == ["cond", "uncond", "ptb"]
    assert passes[2].perturbation == Perturbation(skip_video_self=(0,))


def test_a_given_sound_reads_the_positive_text_always() -> None:
    passes = plan_passes(stream((3.0, 0.0, 3.0), ()), Guidance(), audio_is_given=True)
    assert [one.name for one in passes] == ["cond", "uncond", "mod"]
    assert (passes[1].video_text, passes[1].audio_text) == ("negative", "positive")


def test_no_guidance_is_one_pass() -> None:
    assert plan_passes(Guidance(), Guidance()) == (COND,)
    assert not needs_negative((COND,))
