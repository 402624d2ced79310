"""Which predictions a guided step needs, as data: a list of named passes with what each reads and leaves out.

Source: Lightricks/LTX-2 at 400fd31 (``ltx_pipelines/utils/denoisers.py``). docs/guidance.md has the table.
"""

from dataclasses import dataclass
from typing import Literal

from vgen.diffusion.guidance import MOD, PTB, UNCOND, Guidance
from vgen.models.ltx2.perturbation import Perturbation

Text = Literal["positive", "negative"]


@dataclass(frozen=True)
class Pass:
    """One forward of the transformer within a step. Hashable: a captured graph is keyed by ``perturbation``."""

    name: str
    video_text: Text
    audio_text: Text
    perturbation: Perturbation


COND = Pass("cond", "positive", "positive", Perturbation())
_ISOLATED = Perturbation(skip_audio_to_video="all", skip_video_to_audio="all")


def plan_passes(video: Guidance, audio: Guidance | None, *, audio_is_given: bool = False) -> tuple[Pass, ...]:
    """The passes of every step, the conditional one first; only those that a scale asks for.

    Args:
        audio: None where there is no audio stream. Isolating the modalities then changes nothing and is not run.
        audio_is_given: the sound is an input: its stream reads the positive text in every pass, as in the official
            audio-to-video pipeline.
    """
    streams = [video] if audio is None else [video, audio]
    asked = {name for stream in streams for name in stream.weights()}
    passes = [COND]
    if UNCOND in asked:
        passes.append(Pass(UNCOND, "negative", "positive" if audio_is_given else "negative", Perturbation()))
    if PTB in asked:
        passes.append(Pass(PTB, "positive", "positive", _perturbed(video, audio)))
    if MOD in asked and audio is not None:
        passes.append(Pass(MOD, "positive", "positive", _ISOLATED))
    return tuple(passes)


def _perturbed(video: Guidance, audio: Guidance | None) -> Perturbation:
    def blocks(stream: Guidance | None) -> tuple[int, ...]:
        return stream.stg_blocks if stream is not None and PTB in stream.weights() else ()

    return Perturbation(skip_video_self=blocks(video), skip_audio_self=blocks(audio))


def needs_negative(passes: tuple[Pass, ...]) -> bool:
    """Whether the negative prompt is read at all."""
    return any("negative" in (one.video_text, one.audio_text) for one in passes)
