"""What the training of the tiny Wan has of its own: the model, its tokens, and how clips are made with it.

Tokens have their channels slowest, as the transformer reads them; it writes them fastest.

Shapes: B clips, S video tokens, L text tokens, C latent channels, P latents of a token.
"""

from typing import Any

import torch
from torch import Tensor, nn

from vgen.config import ClipSize, FlowSamplerConfig
from vgen.diffusion.flow_match import TRAIN_TIMESTEPS, History, advance, build_flow_schedule
from vgen.diffusion.wan_guidance import plan_steps
from vgen.models.wan.config import WanArchitecture
from vgen.models.wan.geometry import Geometry
from vgen.models.wan.patches import unpatchify
from vgen.models.wan.text import encode_text
from vgen.models.wan.transformer import Stream, WanTransformer
from vgen.tiny.training.captions import Tokens, with_dropout
from vgen.tiny.training.diffusion import Noisy


class DiffusionModel(nn.Module):
    """Everything between the tokens of a caption and the velocities."""

    def __init__(self, text: dict[str, Any], architecture: WanArchitecture) -> None:
        super().__init__()
        from transformers.models.umt5 import UMT5Config, UMT5EncoderModel

        # Dropout would draw from torch's own random numbers, and a step depends on its generator alone.
        config = UMT5Config(**{**text, "dropout_rate": 0.0})
        self.text_encoder: nn.Module = UMT5EncoderModel(config).encoder
        self.transformer = WanTransformer(architecture.transformer)
        for name, parameter in self.named_parameters():
            if "scale_shift_table" in name:
                nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)

    def contexts(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """[B, L, D], zeros behind each text, which the transformer attends to: L is the same in training and use."""
        return encode_text(self.text_encoder, input_ids, attention_mask)

    def velocities(self, noisy: Noisy, contexts: Tensor, geometry: Geometry) -> tuple[Tensor, None]:
        """[B, S, C * P]; there is no sound."""
        rope = self.transformer.rope_tables(geometry, noisy.video.device)
        timestep = TRAIN_TIMESTEPS * torch.stack([noisy.sigma, torch.zeros_like(noisy.sigma)], dim=1)
        velocity = self.transformer(Stream(noisy.video, timestep, contexts, rows=noisy.given.long()), rope)
        return _swap(velocity, self.transformer.config.out_channels), None


def _swap(tokens: Tensor, fastest: int) -> Tensor:
    """The values of each token in the other order; ``fastest``: how many of them the fastest index counts."""
    return tokens.unflatten(2, (-1, fastest)).transpose(2, 3).flatten(2)


def geometry_of(size: ClipSize, compression: tuple[int, int, int]) -> Geometry:
    time, height, width = compression
    return Geometry((size.num_frames - 1) // time + 1, size.height // height, size.width // width)


def unpack(tokens: Tensor, geometry: Geometry) -> Tensor:
    """Latents [B, C, F, H, W] of tokens [B, S, C * P]: what ``patchify`` undoes."""
    time, height, width = geometry.patch_size
    return unpatchify(_swap(tokens, time * height * width), geometry)


@torch.no_grad()
def generate(
    model: DiffusionModel,
    tokens: Tokens,
    empty: Tokens,
    geometry: Geometry,
    sampler: FlowSamplerConfig,
    generator: torch.Generator,
    first_frame: Tensor | None = None,
) -> tuple[Tensor, None]:
    """Normalized video tokens [B, S, C * P] of captions, by the pipeline's schedule and steps; there is no sound.

    ``tokens`` int64 [B, L]; ``empty`` [L], those of no caption; ``first_frame`` [B, tokens of a frame, C * P] is held.
    """
    device, count = generator.device, len(tokens[0])
    config = model.transformer.config
    width = config.in_channels * (geometry.patch_size[0] * geometry.patch_size[1] * geometry.patch_size[2])
    video = torch.randn(count, geometry.video_tokens, width, generator=generator, device=device)
    given = torch.zeros(video.shape[:2], dtype=torch.bool, device=device)
    given[:, : geometry.frame_tokens] = first_frame is not None
    contexts = [model.contexts(*tokens)]
    if sampler.guidance_scale != 1:
        everywhere = torch.ones(count, dtype=torch.bool, device=device)
        contexts.append(model.contexts(*with_dropout(tokens, empty, everywhere)))
    schedule = build_flow_schedule(sampler.steps, shift=sampler.shift, solver=sampler.solver, grid=sampler.schedule)
    history: History = ()
    for step in plan_steps(schedule, sampler.guidance_scale):
        video = _held(video, first_frame)
        told = torch.full((count,), step.timestep / TRAIN_TIMESTEPS, device=device)
        # There is no true velocity to tell the model's from.
        noisy = Noisy(video, None, video, None, told, given)
        cond, *uncond = (model.velocities(noisy, context, geometry)[0] for context in contexts)
        velocity = torch.lerp(uncond[0], cond, step.guidance) if uncond else cond
        video, history = advance(video, video - step.sigma * velocity, step.weights, history)
    return _held(video, first_frame), None


def _held(video: Tensor, first_frame: Tensor | None) -> Tensor:
    return video if first_frame is None else torch.cat([first_frame, video[:, first_frame.shape[1] :]], dim=1)
