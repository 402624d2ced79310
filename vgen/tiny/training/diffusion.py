"""Text encoder, connectors and transformer together, by flow matching of video and sound.

``x = (1 - sigma) * x0 + sigma * noise``, whose velocity is ``noise - x0``: what ``diffusion.solver.to_x0`` inverts.

Shapes: B clips, S video tokens, A audio tokens, L text tokens, C channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from vgen.config import TrainConfig
from vgen.models.gemma3 import encode_hidden_states
from vgen.models.ltx2.config import LTX2Config
from vgen.models.ltx2.connectors import TextConnectors
from vgen.models.ltx2.geometry import Geometry
from vgen.models.ltx2.transformer import LTX2Transformer, Stream
from vgen.tiny.training.captions import UNKNOWN, choose, with_dropout, with_unknown
from vgen.tiny.training.loop import Batch, Objective

UNIFORM = 0.1
"""Part of the noise levels that are drawn evenly, so that none is rare."""

AUDIO_WEIGHT = 0.5
"""Beside the video's 1: a tone is much easier than a picture."""

LEAST_SIGMA = 1e-3

UNKNOWN_RATE = 0.2
"""Part of the words of a caption with unknown ones that are unknown."""


class DiffusionModel(nn.Module):
    """Everything between the tokens of a caption and the velocities."""

    def __init__(self, text: dict[str, Any], architecture: LTX2Config) -> None:
        super().__init__()
        from transformers.models.gemma3 import Gemma3TextConfig, Gemma3TextModel

        self.text_encoder: nn.Module = Gemma3TextModel(Gemma3TextConfig(**text))
        self.connectors = TextConnectors(
            architecture.video_connector,
            architecture.audio_connector,
            hidden_size=text["hidden_size"],
            num_states=text["num_hidden_layers"] + 1,
            text_projection=architecture.text_projection,
        )
        self.transformer = LTX2Transformer(architecture.transformer)
        _fill_bare_parameters(self)

    def contexts(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Video and audio context [B, L, D] each, as ``stages.text`` makes them."""
        states = encode_hidden_states(self.text_encoder, input_ids, attention_mask)
        video, audio = self.connectors(states, attention_mask)
        return video, audio

    def velocities(self, noisy: "Noisy", contexts: tuple[Tensor, Tensor], geometry: Geometry) -> tuple[Tensor, Tensor]:
        rope = self.transformer.rope_tables(geometry, noisy.video.device, noisy.video.dtype)
        sigmas = torch.stack([noisy.sigma, torch.zeros_like(noisy.sigma)], dim=1)
        video, audio = self.transformer(
            Stream(noisy.video, timestep=sigmas, sigma=noisy.sigma, context=contexts[0], rows=noisy.given.long()),
            Stream(noisy.audio, timestep=noisy.sigma, sigma=noisy.sigma, context=contexts[1]),
            rope,
        )
        return video, audio


def _fill_bare_parameters(model: DiffusionModel) -> None:
    """What the modules leave as they find it in memory."""
    for name, parameter in model.named_parameters():
        if name.endswith("learnable_registers"):
            nn.init.uniform_(parameter, -1, 1)
        elif "scale_shift_table" in name:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)


@dataclass(frozen=True, eq=False)
class Noisy:
    """Tokens at a noise level. ``given``: bool [B, S], those of a first frame that is held; ``sigma`` fp32 [B]."""

    video: Tensor
    audio: Tensor
    video_velocity: Tensor
    audio_velocity: Tensor
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
    video: Tensor, audio: Tensor, geometry: Geometry, shift: float, held: float, generator: torch.Generator
) -> Noisy:
    """Clean tokens [B, S, C] and [B, A, C] at random levels, with the first frame given in a part ``held`` of them."""
    count, device = len(video), video.device
    sigma = draw_sigma(count, shift, generator)
    video_noise = torch.randn(video.shape, generator=generator, device=device)
    audio_noise = torch.randn(audio.shape, generator=generator, device=device)
    first = torch.arange(video.shape[1], device=device) < geometry.frame_tokens
    given = (torch.rand(count, 1, generator=generator, device=device) < held) & first
    # A clip of one frame has nothing left to make.
    given = given & (geometry.latent_frames > 1)
    token_sigma = torch.where(given, 0.0, sigma[:, None])
    return Noisy(
        torch.lerp(video, video_noise, token_sigma[..., None]),
        torch.lerp(audio, audio_noise, sigma[:, None, None]),
        video_noise - video,
        audio_noise - audio,
        sigma,
        given,
    )


@dataclass(frozen=True, eq=False)
class Table:
    """Normalized tokens [B, S, C] and [B, A, C] of many clips of one size, their captions' tokens and those of none."""

    geometry: Geometry
    video: Tensor
    audio: Tensor
    captions: tuple[Tensor, Tensor]
    empty: tuple[Tensor, Tensor]


def diffusion_objective(model: DiffusionModel, tables: Sequence[Table], config: TrainConfig) -> Objective:
    """The tables take turns; each has a number of video tokens of its own."""
    count = config.stages.diffusion.batch_size
    geometries = {table.video.shape[1]: table.geometry for table in tables}

    def draw(step: int, generator: torch.Generator) -> Batch:
        table, device = tables[step % len(tables)], generator.device
        clips = torch.randint(len(table.video), (count,), generator=generator, device=device)
        wording = torch.randint(table.captions[0].shape[1], (count,), generator=generator, device=device)
        dropped = torch.rand(count, generator=generator, device=device) < config.caption_dropout
        odd = torch.rand(count, generator=generator, device=device) < config.unknown_words
        tokens = with_unknown(choose(table.captions, clips, wording), UNKNOWN, odd, UNKNOWN_RATE, generator)
        tokens = with_dropout(tokens, table.empty, dropped)
        noisy = add_noise(
            table.video[clips],
            table.audio[clips],
            table.geometry,
            config.sigma_shift,
            config.image_conditioning,
            generator,
        )
        return {**vars(noisy), "ids": tokens[0], "mask": tokens[1]}

    def losses(batch: Batch) -> dict[str, Tensor]:
        noisy = Noisy(**{field.name: batch[field.name] for field in fields(Noisy)})
        contexts = model.contexts(batch["ids"], batch["mask"])
        return flow_losses(*model.velocities(noisy, contexts, geometries[noisy.video.shape[1]]), noisy)

    return Objective(draw, losses)


def flow_losses(video: Tensor, audio: Tensor, noisy: Noisy) -> dict[str, Tensor]:
    """Squared errors of the velocities; the tokens of a given frame have none."""
    made = (~noisy.given).float()[..., None]
    video_error = (video.float() - noisy.video_velocity).square() * made
    video_loss = video_error.sum() / (made.sum() * video.shape[-1])
    audio_loss = (audio.float() - noisy.audio_velocity).square().mean()
    return {"loss": video_loss + AUDIO_WEIGHT * audio_loss, "video": video_loss, "audio": audio_loss}
