"""Image-to-video conditions against diffusers' tensors, exactly, and its loops; several images frame by frame."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanImageToVideoPipeline

from vgen.diffusion.flow_match import advance, build_flow_schedule
from vgen.diffusion.guidance import UNCOND, Guidance, apply_guidance
from vgen.diffusion.solver import to_x0
from vgen.diffusion.wan_guidance import GuidanceScales, plan_steps
from vgen.models.wan.conditioning import HeldFrames, hold, hold_first_frames, image_channels, place_images

HEIGHT, WIDTH = 32, 48


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def vae() -> AutoencoderKLWan:
    torch.manual_seed(0)
    return AutoencoderKLWan(base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1).eval()


def normalized(vae: AutoencoderKLWan, clip: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        mean = vae.encode(clip).latent_dist.mode()
    shape = (1, -1, 1, 1, 1)
    scale = 1.0 / torch.tensor(vae.config.latents_std).view(shape)
    return (mean - torch.tensor(vae.config.latents_mean).view(shape)) * scale


def image(seed: int) -> torch.Tensor:
    return random(1, 3, HEIGHT, WIDTH, seed=seed).clamp(-1, 1)


class FakeTransformer(torch.nn.Module):
    """A velocity that depends on all that it is given, the timestep of each token included."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain = gain
        self.config = SimpleNamespace(patch_size=(1, 2, 2), in_channels=36, image_dim=None)
        self.dtype, self.device = torch.float32, torch.device("cpu")

    @contextlib.contextmanager
    def cache_context(self, *_: Any, **__: Any) -> Iterator[None]:
        yield

    def forward(
        self, hidden_states: torch.Tensor, timestep: torch.Tensor, encoder_hidden_states: torch.Tensor, **_: Any
    ) -> tuple[torch.Tensor]:
        frames, height, width = hidden_states.shape[2:]
        if timestep.ndim == 2:
            grid = timestep.reshape(-1, 1, frames, height // 2, width // 2)
            timestep = grid.repeat_interleave(2, 3).repeat_interleave(2, 4)
        # The frames before and behind, and all channels, take part: a held frame reaches every other.
        mixed = hidden_states[:, :16] + hidden_states.mean(dim=(1, 2), keepdim=True)
        return (torch.tanh(self.gain * mixed) * (1 + timestep / 1000) + encoder_hidden_states.mean(),)


def diffusers_pipeline(vae: AutoencoderKLWan, **settings: Any) -> WanImageToVideoPipeline:
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0)
    models = {"transformer": FakeTransformer(1.3), "transformer_2": FakeTransformer(0.7)}
    pipeline = WanImageToVideoPipeline(
        tokenizer=None, text_encoder=None, vae=vae, scheduler=scheduler, **models, **settings
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.mark.parametrize("num_frames", [5, 9, 17])
@pytest.mark.parametrize("last", [False, True], ids=["first", "first and last"])
def test_image_channels_are_those_of_diffusers(vae: AutoencoderKLWan, num_frames: int, last: bool) -> None:
    images = {0: image(1), **({num_frames - 1: image(2)} if last else {})}
    noise = random(1, 16, (num_frames - 1) // 4 + 1, 4, 6)
    _, expected = diffusers_pipeline(vae).prepare_latents(
        images[0], batch_size=1, height=HEIGHT, width=WIDTH, num_frames=num_frames, dtype=torch.float32,
        device="cpu", latents=noise, last_image=images.get(num_frames - 1),
    )  # fmt: skip
    ours = image_channels(normalized(vae, place_images(images, num_frames)), images, num_frames)
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("frames", [(0,), (0, 16), (16,), (3,), (0, 1, 2, 3, 4), (12, 0, 5), tuple(range(17))])
def test_mask_of_several_images(frames: tuple[int, ...]) -> None:
    """Told pixel frame by pixel frame: the first four times, then each once, in groups of four."""
    pixels = [frame in frames for frame in [0, 0, 0, *range(17)]]
    condition = image_channels(random(2, 16, 5, 2, 3), frames, 17)
    assert condition.shape == (2, 20, 5, 2, 3)
    for latent_frame in range(5):
        for channel in range(4):
            assert torch.all(condition[:, channel, latent_frame] == pixels[4 * latent_frame + channel])
    assert torch.equal(condition[:, 4:], random(2, 16, 5, 2, 3))


def test_mask_of_one_frame() -> None:
    assert torch.all(image_channels(random(1, 16, 1, 2, 2), [0], 1)[:, :4] == 1)


def test_condition_keeps_the_dtype() -> None:
    assert image_channels(random(1, 16, 2, 2, 2).bfloat16(), [0], 5).dtype == torch.bfloat16


def test_images_are_placed_in_grey() -> None:
    clip = place_images({7: image(3), 0: image(4)}, 9)
    assert torch.equal(clip[:, :, 7], image(3))
    assert torch.equal(clip[:, :, 0], image(4))
    assert torch.all(clip[:, :, [1, 2, 3, 4, 5, 6, 8]] == 0)


@pytest.mark.parametrize(
    ("frames", "num_frames", "message"),
    [
        ([0], 8, "num_frames=8 does not fit the VAE, which takes 1 and then fours; use 5 or 9"),
        ([0], 0, "num_frames=0 does not fit the VAE, .*use 1 or 5"),
        ([0, 9], 9, r"images at frames \[0, 9\]: give one or more, from 0 to 8"),
        ([-1], 9, r"images at frames \[-1\]"),
        ([], 9, r"images at frames \[\]: give one or more"),
    ],
)
def test_refuses_frames(frames: list[int], num_frames: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        place_images({frame: image(1) for frame in frames}, num_frames)
    with pytest.raises(ValueError, match=message):
        image_channels(random(1, 16, 3, 2, 2), frames, num_frames)


def test_refuses_the_latents_of_an_image_alone() -> None:
    with pytest.raises(ValueError, match="has 1 latent frames: 9 frames have 3, so encode the whole clip"):
        image_channels(random(1, 16, 1, 2, 2), [0], 9)


def held_by_diffusers(vae: AutoencoderKLWan) -> tuple[HeldFrames, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    expected = diffusers_pipeline(vae, expand_timesteps=True).prepare_latents(
        image(1), batch_size=1, height=HEIGHT, width=WIDTH, num_frames=9, dtype=torch.float32, device="cpu",
        latents=random(1, 16, 3, 4, 6),
    )  # fmt: skip
    return hold_first_frames(normalized(vae, place_images({0: image(1)}, 1)), 3), expected


def test_held_frame_is_that_of_diffusers(vae: AutoencoderKLWan) -> None:
    held, (latents, condition, mask) = held_by_diffusers(vae)
    assert torch.equal(held.clean, condition)
    assert torch.equal(hold(latents, held), (1 - mask) * condition + mask * latents)
    per_token = (mask[0][0][:, ::2, ::2] * 937).flatten().unsqueeze(0)
    assert torch.equal((held.levels * 937)[held.rows], per_token)


def test_several_held_frames() -> None:
    clean, latents = random(1, 3, 2, 4, 6, seed=1), random(2, 3, 5, 4, 6, seed=2)
    held = hold_first_frames(clean, 5)
    result = hold(latents, held)
    assert torch.equal(result[:, :, :2], clean.expand(2, -1, -1, -1, -1))
    assert torch.equal(result[:, :, 2:], latents[:, :, 2:])
    assert held.rows.tolist() == [[0] * 12 + [1] * 18]
    assert held.levels.tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("shape", "latent_frames", "message"),
    [
        ((1, 3, 3, 4, 6), 3, "3 of 3 latent frames are given: hold 1 to 2"),
        ((1, 3, 0, 4, 6), 3, "0 of 3 latent frames are given"),
        ((1, 3, 1, 3, 6), 3, "latents of 3 x 6 are not whole tokens of 2 x 2: use even latent sizes"),
        ((1, 3, 1, 4, 5), 3, "latents of 4 x 5 are not whole tokens"),
    ],
)
def test_refuses_to_hold(shape: tuple[int, ...], latent_frames: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hold_first_frames(torch.zeros(shape), latent_frames)


@pytest.mark.parametrize("steps", [3, 20])
@pytest.mark.parametrize("kind", ["2.1", "first and last", "A14B", "TI2V-5B"])
def test_the_loop_of_diffusers(vae: AutoencoderKLWan, kind: str, steps: int) -> None:
    boundary, expand = (0.9 if kind == "A14B" else None), kind == "TI2V-5B"
    texts, noise = random(2, 1, 7, 8, seed=3), random(1, 16, 3, 4, 6, seed=4)
    images = {0: image(5), **({8: image(6)} if kind == "first and last" else {})}
    pipeline = diffusers_pipeline(vae, boundary_ratio=boundary, expand_timesteps=expand)
    # Its image processor takes 0 to 1.
    pixels = {frame: (one + 1) / 2 for frame, one in images.items()}
    expected = pipeline(
        image=pixels[0], last_image=pixels.get(8), prompt_embeds=texts[0], negative_prompt_embeds=texts[1],
        height=HEIGHT, width=WIDTH, num_frames=9, num_inference_steps=steps, latents=noise.clone(),
        output_type="latent", guidance_scale=3.5, guidance_scale_2=None if boundary is None else 2.5,
    ).frames  # fmt: skip

    # As it hands them on: to 0..1 and back is not exact.
    images = {frame: 2.0 * one - 1.0 for frame, one in pixels.items()}
    held = hold_first_frames(normalized(vae, images[0].unsqueeze(2)), 3) if expand else None
    channels = None if expand else image_channels(normalized(vae, place_images(images, 9)), images, 9)
    scales = 3.5 if boundary is None else GuidanceScales(high_noise=3.5, low_noise=2.5)
    plans = plan_steps(build_flow_schedule(steps, shift=5.0, grid="diffusers"), scales, boundary)
    models = {"high_noise": pipeline.transformer, "low_noise": pipeline.transformer_2}
    latents, history = noise, ()
    for plan in plans:
        timestep = torch.tensor([plan.timestep])
        if held is not None:
            latents = hold(latents, held)
            timestep = (held.levels * plan.timestep)[held.rows]
        given = latents if channels is None else torch.cat([latents, channels], dim=1)
        cond, uncond = (models[plan.expert](given, timestep, text)[0] for text in texts)
        v = apply_guidance(cond, {UNCOND: uncond}, Guidance(cfg_scale=plan.guidance))
        latents, history = advance(latents, to_x0(latents, plan.sigma, v), plan.weights, history)
    if held is not None:
        latents = hold(latents, held)
    assert {plan.expert for plan in plans} == ({"high_noise"} if boundary is None else {"high_noise", "low_noise"})
    assert (latents - expected).abs().max() <= 1e-6 * expected.abs().max()
