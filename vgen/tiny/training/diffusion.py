"""Text encoder and transformer together, by flow matching of video and, where the model makes it, of sound.

``x = (1 - sigma) * x0 + sigma * noise``, whose velocity is ``noise - x0``: what ``diffusion.solver.to_x0`` inverts.

Shapes: B clips, S video tokens, A audio tokens, L text tokens, C channels of a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from torch import Tensor

from vgen.config import TrainConfig
from vgen.tiny.tokenizer import TextFormat
from vgen.tiny.training.captions import Tokens, choose, with_dropout, with_unknown
from vgen.tiny.training.loop import Batch, Objective

UNIFORM = 0.1
"""Part of the noise levels that are drawn evenly, so that none is rare."""

AUDIO_WEIGHT = 0.5
"""Beside the video's 1: a tone is much easier than a picture."""

LEAST_SIGMA = 1e-3

UNKNOWN_RATE = 0.2
"""Part of the words of a caption with unknown ones that are unknown."""


class Grid(Protocol):
    """What is asked of either family's ``Geometry``."""

    @property
    def latent_frames(self) -> int: ...
    @property
    def frame_tokens(self) -> int: ...


class Model(Protocol):
    """Everything between the tokens of a caption and the velocities; ``contexts`` is for ``velocities`` alone."""

    def contexts(self, input_ids: Tensor, attention_mask: Tensor) -> Any: ...

    def velocities(self, noisy: "Noisy", contexts: Any, geometry: Any) -> tuple[Tensor, Tensor | None]:
        """Of video [B, S, C] and sound [B, A, C], in the order of the tokens' channels."""


@dataclass(frozen=True, eq=False)
class Noisy:
    """Tokens at a noise level. ``given``: bool [B, S], those of a first frame that is held; ``sigma`` fp32 [B].

    A model without sound has no ``audio`` and no ``audio_velocity``.
    """

    video: Tensor
    audio: Tensor | None
    video_velocity: Tensor
    audio_velocity: Tensor | None
    sigma: Tensor
    given: Tensor


def draw_sigma(count: int, shift: float, generator: torch.Generator) -> Tensor:
    """Noise levels [B]: logit-normal about ``shift``, which is the official shift of a logit-normal about 0."""
    device = generator.device
    normal = torch.randn(count, generator=generator, device=device)
    even = torch.rand(count, generator=generator, device=device)
    evenly = torch.rand(count, generator=generator, device=device) < UNIFORM
    return torch.where(evenly, even, torch.sigmoid(normal + shift)).clamp(min=LEAST_SIGMA)


def add_noise(
    video: Tensor, audio: Tensor | None, geometry: Grid, shift: float, held: float, generator: torch.Generator
) -> Noisy:
    """Clean tokens [B, S, C] and [B, A, C] at random levels, with the first frame given in a part ``held`` of them."""
    count, device = len(video), video.device
    sigma = draw_sigma(count, shift, generator)
    video_noise = torch.randn(video.shape, generator=generator, device=device)
    noisy_audio = audio_velocity = None
    if audio is not None:
        audio_noise = torch.randn(audio.shape, generator=generator, device=device)
        noisy_audio, audio_velocity = torch.lerp(audio, audio_noise, sigma[:, None, None]), audio_noise - audio
    first = torch.arange(video.shape[1], device=device) < geometry.frame_tokens
    given = (torch.rand(count, 1, generator=generator, device=device) < held) & first
    # A clip of one frame has nothing left to make.
    given = given & (geometry.latent_frames > 1)
    token_sigma = torch.where(given, 0.0, sigma[:, None])
    return Noisy(
        torch.lerp(video, video_noise, token_sigma[..., None]),
        noisy_audio,
        video_noise - video,
        audio_velocity,
        sigma,
        given,
    )


@dataclass(frozen=True, eq=False)
class Table:
    """Normalized tokens [B, S, C] and [B, A, C] of many clips of one size, their captions' tokens and those of none."""

    geometry: Any
    video: Tensor
    audio: Tensor | None
    captions: Tokens
    empty: Tokens
    text_format: TextFormat


def diffusion_objective(model: Model, tables: Sequence[Table], config: TrainConfig) -> Objective:
    """The tables take turns; each has a number of video tokens of its own."""
    count = config.stages.diffusion.batch_size
    geometries = {table.video.shape[1]: table.geometry for table in tables}

    def draw(step: int, generator: torch.Generator) -> Batch:
        table, device = tables[step % len(tables)], generator.device
        clips = torch.randint(len(table.video), (count,), generator=generator, device=device)
        wording = torch.randint(table.captions[0].shape[1], (count,), generator=generator, device=device)
        dropped = torch.rand(count, generator=generator, device=device) < config.caption_dropout
        odd = torch.rand(count, generator=generator, device=device) < config.unknown_words
        tokens = with_unknown(choose(table.captions, clips, wording), table.text_format, odd, UNKNOWN_RATE, generator)
        tokens = with_dropout(tokens, table.empty, dropped)
        noisy = add_noise(
            table.video[clips],
            None if table.audio is None else table.audio[clips],
            table.geometry,
            config.sigma_shift,
            config.image_conditioning,
            generator,
        )
        parts = {name: part for name, part in vars(noisy).items() if part is not None}
        return {**parts, "ids": tokens[0], "mask": tokens[1]}

    def losses(batch: Batch) -> dict[str, Tensor]:
        noisy = Noisy(**{field.name: batch.get(field.name) for field in fields(Noisy)})  # type: ignore[arg-type]
        contexts = model.contexts(batch["ids"], batch["mask"])
        return flow_losses(*model.velocities(noisy, contexts, geometries[noisy.video.shape[1]]), noisy)

    return Objective(draw, losses)


def flow_losses(video: Tensor, audio: Tensor | None, noisy: Noisy) -> dict[str, Tensor]:
    """Squared errors of the velocities; the tokens of a given frame have none."""
    made = (~noisy.given).float()[..., None]
    video_error = (video.float() - noisy.video_velocity).square() * made
    video_loss = video_error.sum() / (made.sum() * video.shape[-1])
    if audio is None or noisy.audio_velocity is None:
        return {"loss": video_loss}
    audio_loss = (audio.float() - noisy.audio_velocity).square().mean()
    return {"loss": video_loss + AUDIO_WEIGHT * audio_loss, "video": video_loss, "audio": audio_loss}
