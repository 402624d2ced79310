"""Where denoising starts: noise, mixed with the clip, the images and the sound that a request brings."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vgen.models.ltx2.geometry import Geometry
from vgen.stages.condition import Conditions, EncodedImage, condition_images, noised
from vgen.stages.latents import Latents


@dataclass(frozen=True, eq=False)
class Inputs:
    """What a request brings besides text, encoded; all normalized.

    ``images`` each ``[1, C, 1, H, W]`` with its frame and strength; ``clip`` ``[1, F*H*W, C]``; ``audio``
    ``[1, T, C*M]``.
    """

    images: tuple[EncodedImage, ...] = ()
    clip: Tensor | None = None
    audio: Tensor | None = None


def start_latents(
    geometry: Geometry, inputs: Inputs, noise: Latents, noise_level: float, *, audio_is_given: bool
) -> tuple[Latents, Conditions | None]:
    """The first latents, and what the video's conditioned tokens are held to (None where there are none).

    ``noise_level`` is 1 unless there is a clip to start from. As in the official code an audio that is given gets no
    noise.

    Raises:
        ValueError: the audio is said to be given and is not.
    """
    if audio_is_given and inputs.audio is None:
        raise ValueError("the audio is said to be given, but no sound was encoded; encode one or generate it")
    video, conditions = noise.video, None
    if inputs.images:
        conditions = condition_images(geometry, inputs.images, inputs.clip)
        video = noised(conditions, noise.video, noise_level)
    elif inputs.clip is not None:
        video = _mix(inputs.clip, noise.video, noise_level)
    return Latents(video, _start_audio(inputs, noise, noise_level, audio_is_given)), conditions


def _start_audio(inputs: Inputs, noise: Latents, noise_level: float, audio_is_given: bool) -> Tensor | None:
    if noise.audio is None or inputs.audio is None:
        return noise.audio
    return inputs.audio if audio_is_given else _mix(inputs.audio, noise.audio, noise_level)


def _mix(clean: Tensor, noise: Tensor, noise_level: float) -> Tensor:
    return torch.lerp(clean.float(), noise.float(), noise_level).to(noise.dtype)
