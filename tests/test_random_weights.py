"""Random weights: fixed bits whatever the chunking or device, sound statistics, sane activations at full depth."""

import dataclasses
import hashlib
import math
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from vgen.checkpoint_headers import CheckpointError
from vgen.models import gemma3
from vgen.models.ltx2.audio_encoder import AudioEncoder
from vgen.models.ltx2.audio_vae import AudioDecoder
from vgen.models.ltx2.bandwidth import BandwidthExtendedVocoder
from vgen.models.ltx2.config import (
    AudioDecoderConfig,
    AudioEncoderConfig,
    BandwidthExtensionConfig,
    ConnectorConfig,
    DecoderBlock,
    EncoderBlock,
    TransformerConfig,
    UpsamplerConfig,
    VideoDecoderConfig,
    VideoEncoderConfig,
    VocoderConfig,
)
from vgen.models.ltx2.connectors import TextConnectors
from vgen.models.ltx2.geometry import Geometry
from vgen.models.ltx2.transformer import LTX2Transformer, Stream
from vgen.models.ltx2.upsampler import LatentUpsampler
from vgen.models.ltx2.video_encoder import VideoEncoder
from vgen.models.ltx2.video_vae import VideoDecoder
from vgen.models.ltx2.vocoder import Vocoder
from vgen.random_weights import CHUNK, RULES, fill_random, random_tensor

draw = partial(random_tensor, device="cpu", dtype=torch.float32)


def filled(build: Callable[[], nn.Module], name: str, dtype: torch.dtype, **options: Any) -> Any:
    with torch.device("meta"):
        module = build()
    fill_random(module, **{"seed": 0, "device": "cpu", "dtype": dtype, "prefix": name, **options})
    return module.eval()


def by_hand(index: int, name: str, seed: int, centre: float, std: float) -> numpy.float32:
    """The specification in Python integers and single fp32 operations, on its own."""
    digest = hashlib.blake2b(f"{seed}/{index >> 32}/{name}".encode(), digest_size=8).digest()
    x = index % 2**32
    for part in (digest[:4], digest[4:]):
        x ^= int.from_bytes(part, "little")
        x = ((x ^ (x >> 16)) * 0x21F0AAAD) % 2**32
        x = ((x ^ (x >> 15)) * 0x735A2D97) % 2**32
        x ^= x >> 15
    odd = 2 * (x >> 8) + 1 - 2**24
    return numpy.float32(odd) * numpy.float32(std * math.sqrt(3) / 2**24) + numpy.float32(centre)


def test_golden_values() -> None:
    """Written down once: a change of these bits changes every result that was made with random weights."""
    values = draw(5, "transformer.proj_out.weight", 0, 0.0, 1.0)
    assert [value.hex() for value in values.tolist()] == GOLDEN["fp32"]
    values = draw(5, "transformer.proj_out.weight", 7, 1.0, 0.1)
    assert [value.hex() for value in values.tolist()] == GOLDEN["seed 7"]
    values = random_tensor(5, "transformer.proj_out.weight", 0, 0.0, 1.0, "cpu", torch.bfloat16)
    assert [value.hex() for value in values.tolist()] == GOLDEN["bf16"]


@pytest.mark.parametrize(("centre", "std"), [(0.0, 1.0), (1.0, 0.1), (0.0, 1 / math.sqrt(188160))])
def test_values_are_those_of_the_specification(centre: float, std: float) -> None:
    values = draw(1000, "a.weight", 3, centre, std).numpy()
    assert all(values[index] == by_hand(index, "a.weight", 3, centre, std) for index in range(1000))


@pytest.mark.parametrize("chunk", [1, 7, 64, 999, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_do_not_depend_on_the_chunks(chunk: int, dtype: torch.dtype) -> None:
    expected = random_tensor(1000, "a", 0, 0.5, 0.3, "cpu", dtype)
    assert random_tensor(1000, "a", 0, 0.5, 0.3, "cpu", dtype, chunk).equal(expected)


def test_bf16_is_the_rounded_fp32() -> None:
    expected = draw(10000, "a", 0, 0.0, 1.0).to(torch.bfloat16)
    assert random_tensor(10000, "a", 0, 0.0, 1.0, "cpu", torch.bfloat16).equal(expected)


def test_a_prefix_of_a_tensor_is_the_smaller_tensor() -> None:
    assert draw(1000, "a", 0, 0.0, 1.0)[:10].equal(draw(10, "a", 0, 0.0, 1.0))


def test_names_seeds_and_neighbours_are_independent() -> None:
    size = 200_000
    a = draw(size, "blocks.0.weight", 0, 0.0, 1.0)
    others = {
        "name": draw(size, "blocks.1.weight", 0, 0.0, 1.0),
        "seed": draw(size, "blocks.0.weight", 1, 0.0, 1.0),
        "neighbour": a.roll(1),
        "row of 4096": a.roll(4096),
        "square": a.square() - a.square().mean(),
    }
    for what, b in others.items():
        correlation = (a * b).mean() / (a.std() * b.std())
        assert abs(correlation) < 4 / math.sqrt(size), what


def test_the_distribution_is_uniform() -> None:
    size = 1_000_000
    values = draw(size, "a", 0, 2.0, 0.5)
    edge = 0.5 * math.sqrt(3)
    assert abs(values.mean().item() - 2.0) < 4 * 0.5 / math.sqrt(size)
    assert values.std().item() == pytest.approx(0.5, rel=2e-3)
    assert (values - 2.0).abs().max() <= edge
    counts = torch.histc(values, 100, 2.0 - edge, 2.0 + edge)
    chi_square = ((counts - size / 100) ** 2 / (size / 100)).sum().item()
    assert 55 < chi_square < 150  # 99 degrees of freedom: 99.9 % lie between 57 and 149


@pytest.mark.parametrize("size", [0, 1])
def test_tiny_tensors(size: int) -> None:
    assert draw(size, "a", 0, 0.0, 1.0).shape == (size,)


class _Live(TorchDispatchMode):
    """Counts the bytes of tensors that live at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.untyped_storage()._cdata not in self.seen:
            storage = out.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            self.seen.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(out, self._free, key, size)
        return out

    def _free(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


def test_temporary_memory_is_a_chunk_whatever_the_tensor() -> None:
    chunk, size = 1 << 12, 1 << 16
    with _Live() as live:
        out = random_tensor(size, "a", 0, 0.0, 1.0, "cpu", torch.bfloat16, chunk)
    temporary = live.peak - out.nbytes
    assert 16 * chunk <= temporary <= 32 * chunk
    assert temporary / chunk * CHUNK <= 256 * 2**20


class Parts(nn.Module):
    def __init__(self, kind: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 32)
        self.norm2 = nn.LayerNorm(32)
        self.register_buffer("std-of-means", torch.zeros(32, dtype=kind))
        self.register_buffer("table", torch.ones(2, device="cpu"), persistent=False)


def test_fills_parameters_and_buffers_by_their_names() -> None:
    module = filled(Parts, "transformer", torch.float32)
    weight = draw(64 * 32, "transformer.layer.weight", 0, 0.0, 1 / 8).view(32, 64)
    assert module.layer.weight.equal(weight)
    assert module.norm2.weight.equal(draw(32, "transformer.norm2.weight", 0, 1.0, 0.1))
    assert module.get_buffer("std-of-means").equal(draw(32, "transformer.std-of-means", 0, 1.0, 0.15))
    assert module.table.equal(torch.ones(2))
    assert not any(parameter.requires_grad for parameter in module.parameters())
    alone = filled(Parts, "", torch.float32)
    assert alone.layer.bias.equal(draw(32, "layer.bias", 0, 0.0, 0.02))
    other = filled(Parts, "transformer", torch.float32, seed=1)
    assert not other.layer.weight.equal(weight)


def test_constants_of_checkpoints_are_computed() -> None:
    """Each against what it is for, not against the formula again."""
    thin = {"initial_channels": 64, "resblock_kernel_sizes": (3,), "resblock_dilations": ((1,),)}
    config = dataclasses.replace(VOCODER_2_3, **thin)
    extension = dataclasses.replace(EXTENSION, generator=dataclasses.replace(EXTENSION.generator, **thin))
    vocoder = filled(lambda: BandwidthExtendedVocoder(config, extension), "vocoder", torch.float32)
    state = vocoder.state_dict()
    filters = [tensor for name, tensor in state.items() if name.endswith(".filter")]
    assert len(filters) == 2 * (2 * 6 + 1 + 2 * 5 + 1)
    built = BandwidthExtendedVocoder(config, extension).state_dict()
    assert all(state[name].equal(tensor) for name, tensor in built.items() if name.endswith(".filter"))

    # A tone of 10 periods per window is in row 10, whatever its phase; the window spreads it over the two beside.
    for phase in (0.0, math.pi / 2):
        wave = torch.cos(torch.arange(512) * 2 * math.pi * 10 / 512 + phase)
        real, imaginary = (state["mel_stft.stft_fn.forward_basis"][:, 0] @ wave).chunk(2)
        magnitude = torch.sqrt(real**2 + imaginary**2)
        assert magnitude[9:12].tolist() == pytest.approx([64, 128, 64], abs=1e-2)
        assert magnitude[:8].max() < 1e-3
    mel = state["mel_stft.mel_basis"]
    assert torch.allclose(mel.sum(dim=1), torch.ones(64))
    assert (mel > 0).all()
    assert mel.argmax(dim=1).diff().min() >= 0
    # The last of 64 peaks between 0 and 8 kHz, 2840.02 mel: 700 * (10 ** (2840.02 * 64 / 65 / 2595) - 1) = 7670 Hz.
    assert mel.argmax(dim=1)[-1] == round(7670 / 8000 * 256)

    for scale in (1.5, 2.0):
        config = UpsamplerConfig(16, 32, 1, spatial=True, temporal=False, spatial_scale=scale, rational=True)
        upsampler = filled(partial(LatentUpsampler, config), "upsampler", torch.bfloat16)
        built = LatentUpsampler(config).state_dict()["upsampler.blur_down.kernel"]
        assert upsampler.state_dict()["upsampler.blur_down.kernel"].float().equal(built)


def test_what_no_rule_draws_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no rule says how to draw 'x\.std-of-means'"):
        filled(Parts, "x", torch.float32, rules=tuple(rule for rule in RULES if "of-means" not in rule.pattern))
    with pytest.raises(ValueError, match=r"'x\.std-of-means' is torch\.int64; random weights are for floating-point"):
        filled(partial(Parts, torch.int64), "x", torch.float32)

    class Lost(Parts):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("lost", torch.zeros(2, device="meta"), persistent=False)

    with pytest.raises(CheckpointError, match=r"Lost has 1 tensors without values \(lost\)"):
        filled(Lost, "x", torch.float32)


@pytest.mark.gpu
def test_the_gpu_draws_the_same_bits() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for centre, std in ((0.0, 1.0), (1.0, 0.1), (0.0, 1 / math.sqrt(188160))):
            size = (1 << 20) + 13
            cpu = random_tensor(size, "a.weight", 5, centre, std, "cpu", dtype)
            gpu = random_tensor(size, "a.weight", 5, centre, std, "cuda", dtype, chunk=100_001)
            assert gpu.cpu().equal(cpu)


CONNECTOR = ConnectorConfig(
    num_layers=2,
    num_attention_heads=4,
    attention_head_dim=16,
    num_registers=32,
    rope_max_pos=4096,
    rope_theta=10000.0,
    rope_float64=True,
    norm_eps=1e-6,
)
TRANSFORMER = TransformerConfig(
    num_layers=48,
    num_attention_heads=4,
    attention_head_dim=16,
    audio_attention_head_dim=8,
    in_channels=16,
    out_channels=16,
    audio_in_channels=16,
    audio_out_channels=16,
    caption_channels=64,
    norm_eps=1e-6,
    rope_theta=10000.0,
    rope_max_pos=(20, 2048, 2048),
    audio_rope_max_pos=20,
    rope_float64=True,
    timestep_scale_multiplier=1000,
    av_timestep_scale_multiplier=1000,
)
GEMMA = {
    **gemma3.GEMMA3_12B,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
}
UP = DecoderBlock("compress_all", multiplier=2, residual=True)
RES = DecoderBlock("res_x", num_layers=5)
VIDEO_DECODER = VideoDecoderConfig(
    latent_channels=16,
    out_channels=3,
    base_channels=8,
    patch_size=4,
    blocks=(RES, UP, RES, UP, RES, UP, RES),
    spatial_padding_mode="reflect",
    causal=False,
)
AUDIO_DECODER = AudioDecoderConfig(
    base_channels=32,
    channel_multipliers=(1, 2, 4),
    num_res_blocks=2,
    out_channels=2,
    latent_channels=2,
    mel_bins=64,
    sample_rate=16000,
    mel_hop_length=160,
)
VOCODER = VocoderConfig(
    in_channels=128,
    out_channels=2,
    initial_channels=64,
    upsample_rates=(6, 5, 2, 2, 2),
    upsample_kernel_sizes=(16, 15, 8, 4, 4),
    resblock_kernel_sizes=(3, 7, 11),
    resblock_dilations=((1, 3, 5),) * 3,
    output_sample_rate=24000,
)


CONNECTOR_2_3 = dataclasses.replace(CONNECTOR, num_layers=8, gated_attention=True)
TRANSFORMER_2_3 = dataclasses.replace(
    TRANSFORMER, gated_attention=True, cross_attention_adaln=True, caption_projection=False
)
VOCODER_2_3 = dataclasses.replace(
    VOCODER,
    initial_channels=128,
    upsample_rates=(5, 2, 2, 2, 2, 2),
    upsample_kernel_sizes=(11, 4, 4, 4, 4, 4),
    output_sample_rate=16000,
    resblock="AMP1",
    final_activation="clamp",
    final_bias=False,
)
EXTENSION = BandwidthExtensionConfig(
    generator=dataclasses.replace(
        VOCODER_2_3,
        initial_channels=64,
        upsample_rates=(6, 5, 2, 2, 2),
        upsample_kernel_sizes=(12, 11, 4, 4, 4),
        output_sample_rate=48000,
        final_activation="none",
    ),
    input_sample_rate=16000,
    output_sample_rate=48000,
    mel_bins=64,
    n_fft=512,
    win_length=512,
    hop_length=80,
)
VIDEO_DECODER_2_3 = dataclasses.replace(
    VIDEO_DECODER,
    spatial_padding_mode="zeros",
    blocks=(
        DecoderBlock("res_x", 2), DecoderBlock("compress_all", multiplier=2),
        DecoderBlock("res_x", 2), DecoderBlock("compress_all", multiplier=1),
        DecoderBlock("res_x", 4), DecoderBlock("compress_time", multiplier=2),
        DecoderBlock("res_x", 6), DecoderBlock("compress_space", multiplier=2),
        DecoderBlock("res_x", 4),
    ),
)  # fmt: skip


def video_encoder(layers: tuple[int, ...], last_multiplier: int) -> VideoEncoderConfig:
    res = [EncoderBlock("res_x", num_layers=count) for count in layers]
    downs = [EncoderBlock(f"compress_{axes}_res", multiplier=2) for axes in ("space", "time", "all")]
    downs.append(EncoderBlock("compress_all_res", multiplier=last_multiplier))
    blocks = [block for pair in zip(res, downs, strict=False) for block in pair]
    return VideoEncoderConfig(3, 16, 4, (*blocks, res[-1]), "zeros")


VIDEO_ENCODERS = {"2.0": video_encoder((4, 6, 6, 2, 2), 2), "2.3": video_encoder((4, 6, 4, 2, 2), 1)}
AUDIO_ENCODER = AudioEncoderConfig(
    base_channels=32,
    channel_multipliers=(1, 2, 4),
    num_res_blocks=2,
    in_channels=2,
    latent_channels=2,
    mel_bins=64,
    sample_rate=16000,
    mel_hop_length=160,
    n_fft=1024,
)


def deviations(module: nn.Module, names: tuple[str, ...]) -> dict[str, float]:
    """Standard deviation of each output of the submodules under ``names``, filled in by the next forward."""
    seen: dict[str, float] = {}

    def record(name: str, _module: nn.Module, _inputs: object, output: Any) -> None:
        for index, out in enumerate(output if isinstance(output, tuple) else (output,)):
            assert out.isfinite().all(), name
            seen[f"{name}[{index}]"] = out.float().std().item()

    for name, part in module.named_modules():
        if name.rpartition(".")[0] in names:
            part.register_forward_hook(partial(record, name))
    return seen


def check_range(seen: Mapping[str, float], count: int) -> None:
    assert len(seen) == count
    assert all(0.05 < std < 50 for std in seen.values()), seen


@pytest.fixture(scope="module")
def prompt() -> gemma3.Tokens:
    return gemma3.byte_tokenizer().tokenize(["A red fox runs through deep snow at sunrise."], 64)


@torch.no_grad()
def test_text_stays_in_range_through_all_of_gemma_and_the_connectors(prompt: gemma3.Tokens) -> None:
    encoder = filled(lambda: gemma3.build_text_encoder(GEMMA), "text_encoder", torch.bfloat16)
    states = gemma3.encode_hidden_states(encoder, prompt.input_ids, prompt.attention_mask)
    valid = prompt.attention_mask[0].bool()
    check_range({str(layer): state[0, valid].float().std().item() for layer, state in enumerate(states)}, 49)
    assert states[-1][0, valid].float().std().item() == pytest.approx(1, abs=0.1)  # Gemma's gain is 1 + weight
    for config, projection in ((CONNECTOR, "shared"), (CONNECTOR_2_3, "per_modality")):
        audio = dataclasses.replace(config, attention_head_dim=8) if projection == "per_modality" else config
        build = partial(TextConnectors, config, audio, 64, 49, projection)
        connectors = filled(build, "connectors", torch.bfloat16)
        projected = connectors.text_embedding_projection(torch.stack(states, dim=-1), prompt.attention_mask)
        check_range({str(index): part[0, valid].float().std().item() for index, part in enumerate(projected)}, 2)
        contexts = connectors(states, prompt.attention_mask)
        check_range({str(index): context.float().std().item() for index, context in enumerate(contexts)}, 2)


@torch.no_grad()
@pytest.mark.parametrize(("sigma", "version"), [(1.0, "2.0"), (0.1, "2.0"), (0.1, "2.3")])
def test_activations_stay_in_range_through_48_blocks(sigma: float, version: str) -> None:
    config = {"2.0": TRANSFORMER, "2.3": TRANSFORMER_2_3}[version]
    transformer = filled(lambda: LTX2Transformer(config), "transformer", torch.bfloat16)
    seen = deviations(transformer, ("transformer_blocks",))
    generator = torch.Generator().manual_seed(0)
    text_widths = {"2.0": (64, 64), "2.3": (64, 32)}[version]

    def stream(tokens: int, text_width: int) -> Stream:
        latents, context = (
            torch.randn(1, *shape, generator=generator).to(torch.bfloat16) for shape in ((tokens, 16), (32, text_width))
        )
        return Stream(latents, torch.tensor([sigma]), torch.tensor([sigma]), context)

    geometry = Geometry(latent_frames=3, latent_height=4, latent_width=5, fps=24.0, audio_tokens=17)
    rope = transformer.rope_tables(geometry, "cpu", torch.bfloat16)
    velocities = transformer(stream(60, text_widths[0]), stream(17, text_widths[1]), rope)
    check_range(seen, 96)
    for velocity in velocities:
        assert velocity.isfinite().all()
        assert 0.3 < velocity.float().std().item() < 3
        # Tokens must differ, or every frame and every moment of sound would be the same.
        assert velocity.float().std(dim=1).mean().item() > 0.1


@torch.no_grad()
@pytest.mark.parametrize("config", [VIDEO_DECODER, VIDEO_DECODER_2_3], ids=["2.0", "2.3"])
def test_frames_are_neither_constant_nor_clipped(config: VideoDecoderConfig) -> None:
    generator = torch.Generator().manual_seed(0)
    decoder = filled(lambda: VideoDecoder(config), "video_decoder", torch.bfloat16)
    seen = deviations(decoder, ("up_blocks",))
    frames = decoder(torch.randn(1, 16, 3, 2, 3, generator=generator).to(torch.bfloat16)).float()
    check_range(seen, len(config.blocks))
    assert frames.shape == (1, 3, 17, 64, 96)
    assert frames.std(dim=(1, 3, 4)).min() > 0.2
    assert frames.diff(dim=2).abs().mean(dim=(1, 3, 4)).min() > 0.05
    assert (frames.abs() > 1).float().mean() < 0.3


@torch.no_grad()
@pytest.mark.parametrize("version", ["2.0", "2.3"])
def test_latents_of_frames_and_of_sound_are_in_range(version: str) -> None:
    generator = torch.Generator().manual_seed(0)
    config = VIDEO_ENCODERS[version]
    encoder = filled(lambda: VideoEncoder(config), "video_encoder", torch.float32)
    seen = deviations(encoder, ("down_blocks",))
    frames = torch.rand(1, 3, 9, 32, 64, generator=generator).mul(2).sub(1)
    latents = encoder(frames)
    check_range(seen, 9)
    assert latents.shape == (1, 16, 2, 1, 2)
    assert 0.2 < latents.std() < 3

    audio = filled(lambda: AudioEncoder(AUDIO_ENCODER), "audio_encoder", torch.float32)
    sound = audio(2 * torch.randn(1, 2, 61, 64, generator=generator) - 4)
    assert sound.shape[3] == 16
    assert 0.2 < sound.std() < 3


@torch.no_grad()
def test_sound_is_neither_constant_nor_clipped() -> None:
    generator = torch.Generator().manual_seed(0)
    audio = filled(lambda: AudioDecoder(AUDIO_DECODER), "audio_decoder", torch.bfloat16)
    mel = audio(torch.randn(1, 2, 26, 16, generator=generator).to(torch.bfloat16))
    check_range({"mel": mel.float().std().item()}, 1)
    vocoder = filled(lambda: Vocoder(VOCODER), "vocoder", torch.bfloat16)
    seen = deviations(vocoder, ("ups", "resblocks"))
    wave = vocoder(mel).float()
    check_range(seen, 20)
    assert wave.isfinite().all()
    assert 0.05 < wave.std() < 0.5
    assert (wave.abs() > 0.98).float().mean() < 0.02

    extended = filled(lambda: BandwidthExtendedVocoder(VOCODER_2_3, EXTENSION), "vocoder", torch.float32)
    parts = ("vocoder.ups", "vocoder.resblocks", "bwe_generator.ups", "bwe_generator.resblocks")
    seen = deviations(extended, (*parts, ""))
    wave = extended(mel[:, :, :9].float())
    assert all(0.05 < std < 10 for std in seen.values()), seen
    assert len(seen) == 6 * 4 + 5 * 4 + 4
    assert 0.05 < wave.std() < 0.5
    assert (wave.abs() > 0.98).float().mean() < 0.03


@torch.no_grad()
def test_upsampled_latents_are_in_range() -> None:
    config = UpsamplerConfig(16, 64, 4, spatial=True, temporal=False, spatial_scale=2.0, rational=True)
    upsampler = filled(lambda: LatentUpsampler(config), "upsampler", torch.float32)
    latents = torch.randn(1, 16, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    seen = deviations(upsampler, ("", "res_blocks", "post_upsample_res_blocks"))
    out = upsampler(latents)
    assert all(0.05 < std < 10 for std in seen.values()), seen
    assert 0.1 < out.std() < 10


def test_a_wider_model_is_in_the_same_range() -> None:
    """The rules scale with the width: four times the width changes no output's deviation by a third."""
    deviation = []
    for channels in (32, 128):
        config = dataclasses.replace(AUDIO_DECODER, base_channels=channels, latent_channels=channels // 16)
        decoder = filled(partial(AudioDecoder, config), "audio_decoder", torch.float32)
        latents = torch.randn(1, config.latent_channels, 9, 16, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            deviation.append(decoder(latents).std().item())
    assert deviation[1] == pytest.approx(deviation[0], rel=0.33)


GOLDEN: dict[str, list[str]] = {
    "fp32": [
        "-0x1.a0af060000000p+0",
        "-0x1.91eca80000000p+0",
        "0x1.c9bb540000000p-2",
        "0x1.1d00080000000p+0",
        "0x1.9a98060000000p+0",
    ],
    "seed 7": [
        "0x1.05a2b60000000p+0",
        "0x1.0c8c7a0000000p+0",
        "0x1.e915020000000p-1",
        "0x1.ba86640000000p-1",
        "0x1.dd013e0000000p-1",
    ],
    "bf16": [
        "-0x1.a000000000000p+0",
        "-0x1.9200000000000p+0",
        "0x1.ca00000000000p-2",
        "0x1.1e00000000000p+0",
        "0x1.9a00000000000p+0",
    ],
}
