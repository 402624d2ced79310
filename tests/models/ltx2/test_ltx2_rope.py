"""Position tables: against diffusers, against float64 arithmetic, and their cache."""

import dataclasses
import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers.models.transformers.transformer_ltx2 import LTX2AudioVideoRotaryPosEmbed
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2ConditionPipeline

from vgen.models.attention import rotate
from vgen.models.ltx2.config import TransformerConfig
from vgen.models.ltx2.geometry import Geometry
from vgen.models.ltx2.rope import audio_positions, frequency_grid, rope_table, video_positions
from vgen.models.ltx2.transformer import LTX2Transformer
from vgen.models.tables import TableCache

CPU = torch.device("cpu")
GEOMETRY = Geometry(latent_frames=3, latent_height=2, latent_width=3, fps=24.0, audio_tokens=7)
CONFIG = TransformerConfig(
    num_layers=0,
    num_attention_heads=32,
    attention_head_dim=128,
    audio_attention_head_dim=64,
    in_channels=8,
    out_channels=8,
    audio_in_channels=8,
    audio_out_channels=8,
    caption_channels=8,
    norm_eps=1e-6,
    rope_theta=10000.0,
    rope_max_pos=(20.0, 2048.0, 2048.0),
    audio_rope_max_pos=20.0,
    rope_float64=True,
    timestep_scale_multiplier=1000,
    av_timestep_scale_multiplier=1000,
)


def build(config: TransformerConfig = CONFIG) -> LTX2Transformer:
    with torch.device("meta"):
        return LTX2Transformer(config)


def test_positions_are_the_documented_midpoints() -> None:
    video = video_positions(Geometry(16, 2, 3, 24.0, 0), CPU)
    # Pixel frames [0,1), [1,9), [9,17) ... [113,121) at 24 per second.
    assert video[0, ::6][:3].tolist() == pytest.approx([0.5 / 24, 5 / 24, 13 / 24])
    assert video[0, -1].item() == pytest.approx(4.875)
    assert video[1, :6].tolist() == [16, 16, 16, 48, 48, 48]
    assert video[2, :6].tolist() == [16, 48, 80, 16, 48, 80]
    audio = audio_positions(dataclasses.replace(GEOMETRY, audio_tokens=3), CPU)
    # Mel frames [0,1), [1,5), [5,9) at 100 per second.
    assert audio[0].tolist() == pytest.approx([0.005, 0.03, 0.07])
    assert audio.dtype == video.dtype == torch.float32


KEYFRAMES = (25, 1, 8, 256)


@pytest.mark.parametrize("fps", [24.0, 25.0, 23.976, 12.5])
def test_a_keyframe_spans_its_pixel_frame(fps: float) -> None:
    """The official integer bounds, one token at a time; only the division and the mean are fp32."""
    keyframes = video_positions(Geometry(2, 3, 4, fps, 0, KEYFRAMES), CPU)[:, 24:]
    rate = np.float32(fps)
    wanted = [
        (
            (np.float32(frame) / rate + np.float32(frame + 1) / rate) / np.float32(2),
            np.float32((32 * row + 32 * (row + 1)) / 2),
            np.float32((32 * column + 32 * (column + 1)) / 2),
        )
        for frame in KEYFRAMES
        for row in range(3)
        for column in range(4)
    ]
    assert np.array_equal(keyframes.T.numpy(), np.array(wanted, dtype=np.float32))
    assert keyframes[0, ::12].tolist() == pytest.approx([(frame + 0.5) / fps for frame in KEYFRAMES])


def test_keyframes_leave_the_grid_where_it_was() -> None:
    plain = Geometry(3, 2, 3, 24.0, 7)
    grid, both = (video_positions(geometry, CPU) for geometry in (plain, dataclasses.replace(plain, keyframes=(9,))))
    assert grid.shape == (3, 18)
    assert both.shape == (3, 24)
    assert torch.equal(both[:, :18], grid)


def test_tables_with_keyframes_equal_diffusers() -> None:
    geometry = Geometry(5, 4, 6, 23.976, 3, keyframes=KEYFRAMES)
    pipeline = SimpleNamespace(
        transformer_spatial_patch_size=1,
        transformer_temporal_patch_size=1,
        vae_temporal_compression_ratio=8,
        vae_spatial_compression_ratio=32,
    )
    common = {"rope_type": "split", "num_attention_heads": 32, "base_num_frames": 20}
    common |= {"base_height": 2048, "base_width": 2048}
    video, cross = (LTX2AudioVideoRotaryPosEmbed(width, **common) for width in (32 * 128, 32 * 64))
    coords = [video.prepare_video_coords(1, 5, 4, 6, CPU, fps=geometry.fps)]
    for frame in KEYFRAMES:
        coords.append(LTX2ConditionPipeline._prepare_keyframe_coords(pipeline, 1, 4, 6, frame, 1, geometry.fps, CPU))
    coords_BATE = torch.cat(coords, dim=2)

    tables = build().rope_tables(geometry, "cpu", torch.float32)

    for ours, theirs in ((tables.video, video(coords_BATE)), (tables.video_cross, cross(coords_BATE[:, :1]))):
        for ours_part, theirs_part in zip(ours, theirs, strict=True):
            assert ours_part.shape[2] == geometry.video_tokens
            assert torch.equal(ours_part, theirs_part)


@pytest.mark.parametrize("fps", [24.0, 25.0, 23.976])
@pytest.mark.parametrize("float64", [True, False])
@pytest.mark.parametrize(("heads", "head_dim", "audio_head_dim"), [(32, 128, 64), (2, 32, 16)])
def test_tables_equal_diffusers(fps: float, float64: bool, heads: int, head_dim: int, audio_head_dim: int) -> None:
    geometry = Geometry(latent_frames=5, latent_height=4, latent_width=6, fps=fps, audio_tokens=41)
    config = dataclasses.replace(
        CONFIG,
        num_attention_heads=heads,
        attention_head_dim=head_dim,
        audio_attention_head_dim=audio_head_dim,
        rope_float64=float64,
        rope_max_pos=(20.0, 2048.0, 1024.0),
        audio_rope_max_pos=30.0,
    )
    width, audio_width = heads * head_dim, heads * audio_head_dim
    common = {"rope_type": "split", "num_attention_heads": heads, "double_precision": float64}
    video_max = {"base_height": 2048, "base_width": 1024}
    video = LTX2AudioVideoRotaryPosEmbed(width, base_num_frames=20, **video_max, **common)
    audio = LTX2AudioVideoRotaryPosEmbed(
        audio_width, base_num_frames=30, modality="audio", scale_factors=(4,), **common
    )
    cross = LTX2AudioVideoRotaryPosEmbed(audio_width, base_num_frames=30, **video_max, **common)
    video_coords = video.prepare_video_coords(1, 5, 4, 6, CPU, fps=fps)
    audio_coords = audio.prepare_audio_coords(1, 41, CPU)

    tables = build(config).rope_tables(geometry, "cpu", torch.float32)

    for ours, theirs in (
        (tables.video, video(video_coords)),
        (tables.audio, audio(audio_coords)),
        (tables.video_cross, cross(video_coords[:, :1])),
        (tables.audio_cross, audio(audio_coords)),
    ):
        for ours_part, theirs_part in zip(ours, theirs, strict=True):
            assert torch.equal(ours_part, theirs_part)


def test_tables_equal_float64_arithmetic() -> None:
    """Index by index: axis fastest, padding in front, heads cut contiguously; only the angle itself is fp32."""
    geometry = Geometry(latent_frames=2, latent_height=2, latent_width=2, fps=24.0, audio_tokens=0)
    tables = build().rope_tables(geometry, "cpu", torch.float32)
    cos, sin = (table[0].numpy() for table in tables.video)
    seconds, pixels = [0.5 / 24, 5 / 24], [16.0, 48.0]
    tokens = [(t, h, w) for t in seconds for h in pixels for w in pixels]
    frequencies = [np.float32(10000.0 ** (k / 681) * np.pi / 2) for k in range(682)]

    for token, position in enumerate(tokens):
        fractions = [np.float32(p) / np.float32(m) for p, m in zip(position, (20, 2048, 2048), strict=True)]
        turns = [np.float32(2) * fraction - np.float32(1) for fraction in fractions]
        angles = [0.0, 0.0] + [float(f * turn) for f in frequencies for turn in turns]
        expected = np.array(angles, dtype=np.float64).reshape(32, 64)
        np.testing.assert_allclose(cos[:, token], np.cos(expected), rtol=0, atol=1.3e-7)
        np.testing.assert_allclose(sin[:, token], np.sin(expected), rtol=0, atol=1.3e-7)


@pytest.mark.parametrize("count", [682, 1024, 1920])
def test_float64_grid_is_right_to_the_last_bit(count: int) -> None:
    # numpy's power and spacing, as the official code has them; at every real size of LTX-2 2.0.
    exact = 10000.0 ** np.linspace(0.0, 1.0, count, dtype=np.float64) * np.pi / 2
    assert np.array_equal(frequency_grid(count, 10000.0, float64=True).numpy(), exact.astype(np.float32))
    assert not np.array_equal(frequency_grid(count, 10000.0, float64=False).numpy(), exact.astype(np.float32))


def test_dtype_is_a_cast_of_the_fp32_tables() -> None:
    model = build()
    exact = model.rope_tables(GEOMETRY, "cpu", torch.float32)
    rounded = model.rope_tables(GEOMETRY, "cpu", torch.bfloat16)
    for field in dataclasses.fields(exact):
        for fine, coarse in zip(getattr(exact, field.name), getattr(rounded, field.name), strict=True):
            assert fine.dtype == torch.float32
            assert torch.equal(fine.bfloat16(), coarse)


def test_rotation_is_a_rotation_of_far_pairs() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 5, 8, generator=generator, dtype=torch.float64)
    angles = torch.randn(1, 3, 5, 4, generator=generator, dtype=torch.float64)
    expected = torch.complex(x[..., :4], x[..., 4:]) * torch.exp(1j * angles)

    out = rotate(x, angles.cos(), angles.sin())

    torch.testing.assert_close(out, torch.cat([expected.real, expected.imag], dim=-1), rtol=0, atol=1e-14)


def test_rotation_keeps_the_memory_order_of_projected_heads() -> None:
    # Kernels read [B, S, N, H] buffers as they are; a rotation that wrote [B, N, S, H] would cost a copy afterwards.
    x = torch.randn(2, 5, 3 * 8).unflatten(-1, (3, 8)).transpose(1, 2)
    table = rope_table(torch.rand(1, 5), (1.0,), 24, 3, 10000.0, True, torch.float32)
    out = rotate(x, *table)
    assert out.stride() == x.stride()
    assert table[0].transpose(1, 2).is_contiguous()


def tensors(tables: object) -> list[torch.Tensor]:
    return [table for pair in vars(tables).values() for table in pair]


def test_second_call_returns_the_same_tensors() -> None:
    model = build()
    first = model.rope_tables(GEOMETRY, "cpu", torch.float32)
    equal_geometry = Geometry(3, 2, 3, 24.0, 7)
    for device in ("cpu", "cpu:0", CPU):  # one device under several names
        second = model.rope_tables(equal_geometry, device, torch.float32)
        assert all(a is b for a, b in zip(tensors(first), tensors(second), strict=True))
    others = [
        model.rope_tables(dataclasses.replace(GEOMETRY, fps=25.0), "cpu", torch.float32),
        model.rope_tables(dataclasses.replace(GEOMETRY, keyframes=(9,)), "cpu", torch.float32),
        model.rope_tables(GEOMETRY, "cpu", torch.bfloat16),
        model.rope_tables(GEOMETRY, "meta", torch.float32),
    ]
    assert all(other.video[0] is not first.video[0] for other in others)
    assert not torch.equal(others[0].video[0], first.video[0])
    assert build().rope_tables(GEOMETRY, "cpu", torch.float32).video[0] is not first.video[0]


def test_cache_keeps_four_geometries_and_drops_the_one_used_longest_ago() -> None:
    model = build()
    geometries = [dataclasses.replace(GEOMETRY, fps=float(fps)) for fps in range(20, 25)]
    kept = [model.rope_tables(geometry, "cpu", torch.float32) for geometry in geometries[:4]]
    model.rope_tables(geometries[0], "cpu", torch.float32)  # the second is now the oldest
    dropped = weakref.ref(kept[1].video[0])
    alive = [weakref.ref(tables.video[0]) for tables in (kept[0], kept[2], kept[3])]
    del kept
    model.rope_tables(geometries[4], "cpu", torch.float32)
    gc.collect()
    assert dropped() is None
    assert all(reference() is not None for reference in alive)
    assert len(model._rope_cache) == 4


def test_tables_are_freed_with_the_model() -> None:
    model = build()
    reference = weakref.ref(model.rope_tables(GEOMETRY, "cpu", torch.float32).video[0])
    assert reference() is not None
    gc.disable()  # no help from the collector: 126 MB tables must not wait for it
    try:
        del model
        assert reference() is None
    finally:
        gc.enable()


def test_tables_are_no_part_of_the_checkpoint() -> None:
    model = build()
    names = set(model.state_dict())
    model.rope_tables(GEOMETRY, "cpu", torch.float32)
    assert set(model.state_dict()) == names


def test_cache_builds_once_per_key() -> None:
    built: list[str] = []
    cache: TableCache[str] = TableCache(size=2)
    for key in ("a", "b", "a", "c", "a", "b"):
        assert cache.get(key, lambda key=key: built.append(key) or key) == key
    assert built == ["a", "b", "c", "b"]
