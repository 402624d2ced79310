"""Conditioning on images: the official rule told token by token, diffusers where it agrees, and where it does not."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2ConditionPipeline, LTX2VideoCondition

from vgen.models.ltx2.geometry import Geometry
from vgen.models.ltx2.rope import video_positions
from vgen.stages.condition import Conditions, EncodedImage, blend, condition_images, noised
from vgen.stages.latents import pack_video

CHANNELS = 5
GRID = Geometry(latent_frames=4, latent_height=2, latent_width=3, fps=24.0, audio_tokens=0)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_keyframes(*frames: int) -> Geometry:
    return Geometry(4, 2, 3, 24.0, 0, keyframes=frames)


def image(frame: int, strength: float, seed: int | None = None) -> EncodedImage:
    return EncodedImage(random(1, CHANNELS, 1, 2, 3, seed=100 + frame if seed is None else seed), frame, strength)


# One, three and five images, in any order; strengths that fp32 holds and ones that it does not.
CASES = [
    [image(0, 1.0)],
    [image(0, 0.7)],
    [image(25, 0.35)],
    [image(17, 0.6), image(0, 0.9), image(3, 1.0)],
    [image(8, 0.25), image(24, 0.6), image(1, 0.25), image(0, 0.0), image(16, 0.0)],
]


def geometry_of(images: Sequence[EncodedImage]) -> Geometry:
    return with_keyframes(*(image.frame for image in images if image.frame != 0))


def official(
    images: Sequence[EncodedImage], clip: torch.Tensor | None, noise: torch.Tensor, noise_scale: float, x0: torch.Tensor
) -> tuple[list[list[float]], list[float], list[list[float]], list[list[float]]]:
    """Clean tokens, mask, first latents and blended x0, each a list over tokens, as Lightricks/LTX-2 at 400fd31 has
    them: numbers of Python, nothing of torch but reading."""
    tokens = [[0.0] * CHANNELS for _ in range(24)] if clip is None else clip[0].double().tolist()
    clean, noisy, mask = [list(token) for token in tokens], [list(token) for token in tokens], [1.0] * 24
    for given in images:
        content = [
            [given.latents[0, c, 0, h, w].double().item() for c in range(CHANNELS)] for h in range(2) for w in range(3)
        ]
        if given.frame == 0:
            clean[:6], mask[:6] = content, [1.0 - given.strength] * 6
        else:
            clean, mask = clean + content, mask + [1.0 - given.strength] * 6
            noisy = noisy + [[0.0] * CHANNELS for _ in range(6)]

    def mix(a: float, b: float, part: float) -> float:
        return a + (b - a) * part

    drawn, predicted = noise[0].double().tolist(), x0[0].double().tolist()
    first, blended = [], []
    for token, part in enumerate(mask):
        noised = [mix(a, b, noise_scale) for a, b in zip(noisy[token], drawn[token], strict=True)]
        first.append([mix(a, b, part) for a, b in zip(clean[token], noised, strict=True)])
        blended.append([a * part + b * (1 - part) for a, b in zip(predicted[token], clean[token], strict=True)])
    return clean, mask, first, blended


@pytest.mark.parametrize("images", CASES, ids=lambda images: "-".join(f"{i.frame}@{i.strength}" for i in images))
@pytest.mark.parametrize("from_clip", [False, True])
@pytest.mark.parametrize("noise_scale", [1.0, 0.8])
def test_equals_the_official_rule(images: list[EncodedImage], from_clip: bool, noise_scale: float) -> None:
    geometry = geometry_of(images)
    clip = random(1, 24, CHANNELS, seed=1) if from_clip else None
    noise, x0 = (random(1, geometry.video_tokens, CHANNELS, seed=seed) for seed in (2, 3))
    conditions = condition_images(geometry, images, clip)
    clean, mask, first, blended = (torch.tensor([part]) for part in official(images, clip, noise, noise_scale, x0))

    assert torch.equal(conditions.clean, clean.float())
    assert torch.equal(conditions.mask, mask.float())
    assert conditions.mask.dtype == conditions.levels.dtype == torch.float32
    torch.testing.assert_close(noised(conditions, noise, noise_scale), first.float(), rtol=0, atol=5e-7)
    torch.testing.assert_close(blend(x0, conditions), blended.float(), rtol=0, atol=5e-7)


@pytest.mark.parametrize("images", CASES, ids=lambda images: str(len(images)))
def test_levels_and_rows_are_the_mask_with_each_value_once(images: list[EncodedImage]) -> None:
    conditions = condition_images(geometry_of(images), images)
    assert conditions.rows.shape == conditions.mask.shape
    assert conditions.rows.dtype == torch.int64
    assert torch.equal(conditions.levels[conditions.rows], conditions.mask)
    assert torch.equal(conditions.levels, conditions.mask.unique())


def test_an_image_at_frame_0_adds_no_token_and_any_other_one_frame_of_them() -> None:
    assert condition_images(GRID, [image(0, 1.0)]).clean.shape == (1, 24, CHANNELS)
    # Frame 8 ends the second latent frame and frame 9 starts the third; neither replaces one.
    conditions = condition_images(with_keyframes(9, 8), [image(9, 1.0), image(8, 1.0)])
    assert conditions.clean.shape == (1, 36, CHANNELS)
    assert conditions.clean[:, :24].abs().max() == 0
    assert torch.equal(conditions.clean[:, 24:30], pack_video(image(9, 1.0).latents))
    assert torch.equal(conditions.clean[:, 30:], pack_video(image(8, 1.0).latents))


def test_tokens_follow_the_order_of_the_transformer() -> None:
    """Height before width, as `pack_video` has the grid."""
    clip = random(1, CHANNELS, 4, 2, 3)
    first = EncodedImage(clip[:, :, :1], 0, 1.0)
    conditions = condition_images(GRID, [first], pack_video(clip))
    assert torch.equal(conditions.clean, pack_video(clip))
    assert torch.equal(conditions.start, pack_video(clip))


def held(conditions: Conditions, value: float) -> torch.Tensor:
    return conditions.mask[0] == value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_held_tokens_keep_their_bits_and_free_ones_are_the_noise(dtype: torch.dtype) -> None:
    images = [
        EncodedImage(given.latents.to(dtype), given.frame, strength)
        for given, strength in zip(CASES[3], (1.0, 0.0, 1.0), strict=True)
    ]
    geometry = geometry_of(images)
    conditions = condition_images(geometry, images)
    noise, x0 = (random(1, geometry.video_tokens, CHANNELS, seed=seed).to(dtype) for seed in (2, 3))
    start, blended = noised(conditions, noise, 1.0), blend(x0, conditions)
    assert start.dtype == blended.dtype == conditions.clean.dtype == dtype
    for value, (wanted_start, wanted_x0) in ((0.0, (conditions.clean,) * 2), (1.0, (noise, x0))):
        tokens = held(conditions, value)
        assert tokens.sum() in (12, 24)
        assert torch.equal(start[:, tokens], wanted_start[:, tokens])
        assert torch.equal(blended[:, tokens], wanted_x0[:, tokens])


def test_bf16_is_rounded_once_at_the_end() -> None:
    images = [EncodedImage(given.latents.bfloat16(), given.frame, given.strength) for given in CASES[3]]
    geometry = geometry_of(images)
    clip = random(1, 24, CHANNELS, seed=1).bfloat16()
    noise, x0 = (random(1, geometry.video_tokens, CHANNELS, seed=seed).bfloat16() for seed in (2, 3))
    exact = [EncodedImage(given.latents.float(), given.frame, given.strength) for given in images]
    coarse, fine = condition_images(geometry, images, clip), condition_images(geometry, exact, clip.float())
    assert torch.equal(noised(coarse, noise, 0.7), noised(fine, noise.float(), 0.7).bfloat16())
    assert torch.equal(blend(x0, coarse), blend(x0.float(), fine).bfloat16())


# ---------------------------------------------------------------- diffusers


class Oracle:
    """What diffusers' pipeline does to latents, around an encoder that is a fixed linear map."""

    _pack_latents = staticmethod(LTX2ConditionPipeline._pack_latents)
    _normalize_latents = staticmethod(LTX2ConditionPipeline._normalize_latents)
    _prepare_keyframe_coords = LTX2ConditionPipeline._prepare_keyframe_coords
    apply_first_frame_conditioning = LTX2ConditionPipeline.apply_first_frame_conditioning
    prepare_latents = LTX2ConditionPipeline.prepare_latents
    preprocess_conditions = LTX2ConditionPipeline.preprocess_conditions
    trim_conditioning_sequence = LTX2ConditionPipeline.trim_conditioning_sequence
    vae_spatial_compression_ratio, vae_temporal_compression_ratio = 32, 8
    transformer_spatial_patch_size = transformer_temporal_patch_size = 1

    def __init__(self) -> None:
        self.vae = SimpleNamespace(
            dtype=torch.float32,
            encode=self.encode,
            latents_mean=random(CHANNELS, seed=11),
            latents_std=random(CHANNELS, seed=12).abs() + 0.5,
            config=SimpleNamespace(scaling_factor=1.0),
        )

    def encode(self, pixels: torch.Tensor) -> SimpleNamespace:
        pooled = torch.nn.functional.avg_pool3d(pixels, (1, 32, 32))
        return SimpleNamespace(latents=torch.einsum("bpfhw,cp->bcfhw", pooled, random(CHANNELS, 3, seed=13)))

    def encoded(self, pixels: torch.Tensor) -> torch.Tensor:
        frames = pixels.permute(2, 0, 1)[None, :, None].float() / 127.5 - 1
        return self._normalize_latents(self.encode(frames).latents, self.vae.latents_mean, self.vae.latents_std)


# Latent index i of diffusers is the pixel frame (i - 1) * 8 + 1, the first of that latent frame; 0 is 0.
GIVEN = [(3, 17, 0.6), (0, 0, 0.85), (1, 1, 1.0)]


def run_diffusers(
    noise_scale: float,
) -> tuple[torch.Tensor, Conditions, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Our latents, conditions and positions, and what diffusers returns, for `GIVEN` and one seed."""
    oracle = Oracle()
    pixels = [
        torch.randint(0, 256, (64, 96, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(index))
        for index, *_ in GIVEN
    ]
    conditions = [
        LTX2VideoCondition(frames=image.numpy(), index=index, strength=strength, crf=0)
        for image, (index, _, strength) in zip(pixels, GIVEN, strict=True)
    ]
    theirs = oracle.prepare_latents(
        conditions,
        num_channels_latents=CHANNELS,
        height=64,
        width=96,
        num_frames=25,
        frame_rate=24.0,
        noise_scale=noise_scale,
        dtype=torch.float32,
        device=torch.device("cpu"),
        generator=torch.Generator().manual_seed(7),
    )
    geometry = with_keyframes(17, 1)
    images = [
        EncodedImage(oracle.encoded(image), frame, strength)
        for image, (_, frame, strength) in zip(pixels, GIVEN, strict=True)
    ]
    ours = condition_images(geometry, images)
    noise = random(1, geometry.video_tokens, CHANNELS, seed=7)
    positions = video_positions(geometry, torch.device("cpu"))
    return noised(ours, noise, noise_scale), ours, positions, noise, theirs


def test_equals_diffusers_from_pure_noise() -> None:
    latents, conditions, positions, _, (their_latents, their_mask, their_clean, their_coords) = run_diffusers(1.0)
    torch.testing.assert_close(conditions.clean, their_clean, rtol=0, atol=1e-6)
    torch.testing.assert_close(1 - conditions.mask, their_mask[..., 0], rtol=0, atol=1e-7)
    torch.testing.assert_close(latents, their_latents, rtol=0, atol=1e-6)
    assert torch.equal(positions[:, 24:], their_coords[0].mean(dim=-1))
    x0 = random(*latents.shape, seed=8)
    their_x0 = x0 * (1 - their_mask) + their_clean * their_mask  # as in its loop
    torch.testing.assert_close(blend(x0, conditions), their_x0, rtol=0, atol=1e-6)


def test_parts_from_diffusers_where_a_half_held_image_meets_half_the_noise() -> None:
    """diffusers starts those tokens from the image, the official code from zeros; all others agree."""
    latents, conditions, _, noise, (their_latents, *_) = run_diffusers(0.5)
    partly = (conditions.mask > 0) & (conditions.mask < 1)
    torch.testing.assert_close(latents[~partly], their_latents[~partly], rtol=0, atol=1e-6)
    mask, clean = conditions.mask[..., None], conditions.clean
    torch.testing.assert_close(latents, clean * (1 - mask) + 0.5 * noise * mask, rtol=0, atol=1e-6)
    torch.testing.assert_close(their_latents - latents, 0.5 * mask * clean, rtol=0, atol=1e-6)
    assert (their_latents - latents)[partly].abs().max() > 0.1


# ---------------------------------------------------------------- what does not fit


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"images at \(9,\) have places for \(\)"):
        condition_images(GRID, [image(9, 1.0)])
    with pytest.raises(ValueError, match=r"images at \(9, 3\) have places for \(3, 9\)"):
        condition_images(with_keyframes(3, 9), [image(9, 1.0), image(3, 1.0)])
    wide = EncodedImage(random(1, CHANNELS, 1, 3, 2), 0, 1.0)
    with pytest.raises(ValueError, match=r"image at frame 0 has latents of \(1, 5, 1, 3, 2\): .* \[1, C, 1, 2, 3\]"):
        condition_images(GRID, [wide])
    long = EncodedImage(random(1, CHANNELS, 2, 2, 3), 0, 1.0)
    with pytest.raises(ValueError, match="image at frame 0"):
        condition_images(GRID, [long])
    with pytest.raises(ValueError, match=r"clip has latents of \(1, 18, 5\): the video takes \[1, 24, 5\]"):
        condition_images(GRID, [image(0, 1.0)], random(1, 18, CHANNELS))
