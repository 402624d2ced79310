"""What the training of the tiny LTX-2 has of its own: the model, and how clips are made with it.

Shapes: B clips, S video tokens, A audio tokens, L text tokens, C channels.
"""

from typing import Any

import torch
from torch import Tensor, nn

from vgen.config import ClipSize, SamplerConfig
from vgen.diffusion.guidance import UNCOND, Guidance, apply_guidance
from vgen.diffusion.schedule import build_sigmas
from vgen.diffusion.solver import to_x0
from vgen.models.gemma3 import encode_hidden_states
from vgen.models.ltx2.config import AUDIO_LATENTS_PER_SECOND, LTX2Config
from vgen.models.ltx2.connectors import TextConnectors
from vgen.models.ltx2.geometry import Geometry
from vgen.models.ltx2.transformer import LTX2Transformer, Stream
from vgen.stages.denoise import denoise, euler
from vgen.stages.latents import Latents
from vgen.tiny.training.captions import Tokens, with_dropout
from vgen.tiny.training.data import FPS
from vgen.tiny.training.diffusion import Noisy


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

    def velocities(self, noisy: Noisy, contexts: tuple[Tensor, Tensor], geometry: Geometry) -> tuple[Tensor, Tensor]:
        assert noisy.audio is not None
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


def geometry_of(size: ClipSize, compression: tuple[int, int, int]) -> Geometry:
    """As ``stages.latents.latent_geometry`` of a request of this size."""
    time, height, width = compression
    return Geometry(
        latent_frames=(size.num_frames - 1) // time + 1,
        latent_height=size.height // height,
        latent_width=size.width // width,
        fps=FPS,
        audio_tokens=max(1, round(size.num_frames / FPS * AUDIO_LATENTS_PER_SECOND)),
    )


@torch.no_grad()
def generate(
    model: DiffusionModel,
    tokens: Tokens,
    empty: Tokens,
    geometry: Geometry,
    sampler: SamplerConfig,
    generator: torch.Generator,
    first_frame: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Normalized video tokens [B, S, C] and audio tokens [B, A, C] of captions, by the pipeline's schedule and steps.

    ``tokens`` int64 [B, L]; ``empty`` [L], those of no caption; ``first_frame`` [B, tokens of a frame, C] is held. Of
    ``sampler`` the steps and the video's ``cfg_scale`` count.
    """
    device, count, guidance = generator.device, len(tokens[0]), Guidance(cfg_scale=sampler.video.cfg_scale)
    config = model.transformer.config
    video = torch.randn(count, geometry.grid_tokens, config.in_channels, generator=generator, device=device)
    audio = torch.randn(count, geometry.audio_tokens, config.audio_in_channels, generator=generator, device=device)
    given = torch.zeros(video.shape[:2], dtype=torch.bool, device=device)
    if first_frame is not None:
        video[:, : geometry.frame_tokens] = first_frame
        given[:, : geometry.frame_tokens] = True
    contexts = {"cond": model.contexts(*tokens)}
    if guidance.weights():
        everywhere = torch.ones(count, dtype=torch.bool, device=device)
        contexts[UNCOND] = model.contexts(*with_dropout(tokens, empty, everywhere))

    def predict(latents: Latents, sigma: Tensor, step: int) -> Latents:  # noqa: ARG001
        assert latents.audio is not None
        # There is no true velocity to tell the model's from.
        noisy = Noisy(latents.video, latents.audio, latents.video, latents.audio, sigma.expand(count), given)
        velocities = {name: model.velocities(noisy, context, geometry) for name, context in contexts.items()}
        token_sigma = torch.where(given, 0.0, sigma)
        video = {name: to_x0(latents.video, token_sigma, velocity) for name, (velocity, _) in velocities.items()}
        audio = {name: to_x0(latents.audio, sigma, velocity) for name, (_, velocity) in velocities.items()}
        return Latents(apply_guidance(video["cond"], video, guidance), apply_guidance(audio["cond"], audio, guidance))

    sigmas = build_sigmas(sampler.steps, schedule="official", video_tokens=geometry.video_tokens).to(device)
    made = denoise(euler(predict), Latents(video, audio), sigmas)
    assert made.audio is not None
    return made.video, made.audio
