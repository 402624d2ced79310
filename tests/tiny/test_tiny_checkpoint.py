"""The shipped tiny checkpoint: what its files hold, and that diffusers makes the same clip from the same noise."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import vgen
from tests import tiny_ltx2
from tests.pipelines.test_ltx2_pipeline import diffusers_pipeline, generate, make_job, noise_of, relative
from vgen import checkpoint, checkpoint_files
from vgen.components import ltx2
from vgen.diffusion.schedule import build_sigmas
from vgen.job import Job
from vgen.models.ltx2.config_upsampler import upsampler_from_official
from vgen.models.ltx2.mel import log_mel
from vgen.models.ltx2.upsampler import LatentUpsampler
from vgen.tiny.grammar import sample_scene
from vgen.tiny.render import render

FOLDER = Path(vgen.__file__).parent / "weights" / "ltx2_tiny"
OFFICIAL, UPSAMPLER = FOLDER / "ltx-2-tiny.safetensors", FOLDER / "ltx-2-tiny-spatial-upscaler-x2.safetensors"
GEMMA = FOLDER / "gemma"
WEIGHTS = (OFFICIAL, UPSAMPLER, GEMMA / "model.safetensors")

LARGEST = 20e6
"""Bytes of the whole folder."""

LEAST_PSNR = 100.0
"""Decibels between the pictures of both codes. Measured: 115, which is rounding."""

LARGEST_ERROR = 1e-5
"""Between waveforms or latents, as a part of the largest value. Measured: 1.3e-6."""

CPU = torch.device("cpu")
STEPS = 6


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """What a user gets, in fp32 and with fewer steps."""
    return make_job(tmp_path, "model=ltx2_tiny", f"sampler.steps={STEPS}")


# ---------------------------------------------------------------- the files


def test_the_folder_is_small_enough() -> None:
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) <= LARGEST


@pytest.mark.parametrize("path", WEIGHTS, ids=lambda path: path.stem)
def test_weights_are_bf16_and_finite(path: Path) -> None:
    for name, tensor in load_file(path).items():
        assert tensor.dtype == (torch.float32 if "per_channel_statistics" in name else torch.bfloat16), name
        assert tensor.isfinite().all(), name


def test_statistics_are_measured_ones() -> None:
    tensors = {name: t for name, t in load_file(OFFICIAL).items() if "per_channel_statistics" in name}
    assert len(tensors) == 4
    for name, tensor in tensors.items():
        assert tensor.unique().numel() == tensor.numel(), name
        assert "std" not in name or (tensor > 0).all(), name


def test_headers_have_the_config() -> None:
    assert header(OFFICIAL).keys() >= {"transformer", "vae", "audio_vae", "vocoder"}
    assert header(UPSAMPLER)["_class_name"] == "LatentUpsampler"


def test_the_card_states_the_licence() -> None:
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert re.search(r"licen[cs]e\W.*apache-2\.0", card, re.IGNORECASE)


# ---------------------------------------------------------------- the same in diffusers


def header(path: Path) -> dict[str, Any]:
    with safe_open(path, framework="pt") as file:
        config: dict[str, Any] = json.loads(file.metadata()["config"])
    return config


@pytest.fixture(scope="module")
def parts() -> tiny_ltx2.Parts:
    """The checkpoint in fp32 as diffusers' and transformers' modules, by the official names and words alone."""
    from transformers import AutoTokenizer
    from transformers.models.gemma3 import Gemma3TextModel

    config = header(OFFICIAL)
    text_encoder, report = Gemma3TextModel.from_pretrained(GEMMA, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), report
    parts = tiny_ltx2.Parts(
        transformer=_transformer(config["transformer"]),
        connectors=_connectors(config["transformer"], text_encoder.config),
        vae=_video_vae(config["vae"]),
        audio_vae=_audio_vae(config["audio_vae"]),
        vocoder=_vocoder(config["vocoder"]),
        text_encoder=_frozen(text_encoder),
        tokenizer=AutoTokenizer.from_pretrained(GEMMA),
    )
    _fill(parts, load_file(OFFICIAL))
    made = tiny_ltx2.official_config(parts)
    made["vocoder"]["output_sampling_rate"] = parts.vocoder.config.output_sampling_rate
    _assert_says(made, config)
    return parts


def _fill(parts: tiny_ltx2.Parts, tensors: Mapping[str, Tensor]) -> None:
    """Copy ``tensors`` into the modules: each has its place, and no place is left."""
    places = tiny_ltx2.used_tensors(parts)
    assert places.keys() == tensors.keys()
    for name, place in places.items():
        assert place.shape == tensors[name].shape, name
        place.copy_(tensors[name])


def _assert_says(config: Any, expected: Any, path: str = "config") -> None:
    """``config`` has all that ``expected`` has, with the same values."""
    if not isinstance(expected, dict):
        assert config == expected, path
        return
    for key, value in expected.items():
        assert key in config, f"{path}.{key}"
        _assert_says(config[key], value, f"{path}.{key}")


def _frozen(module: nn.Module) -> Any:
    return module.eval().requires_grad_(False)


def _transformer(config: Mapping[str, Any]) -> Any:
    from diffusers.models.transformers import LTX2VideoTransformer3DModel

    same = (
        "num_layers", "num_attention_heads", "attention_head_dim", "audio_num_attention_heads",
        "audio_attention_head_dim", "cross_attention_dim", "audio_cross_attention_dim", "in_channels", "out_channels",
        "audio_in_channels", "audio_out_channels", "caption_channels", "norm_eps", "timestep_scale_multiplier",
        "rope_type",
    )  # fmt: skip
    frames, height, width = config["positional_embedding_max_pos"]
    model = LTX2VideoTransformer3DModel(
        **{name: config[name] for name in same},
        pos_embed_max_pos=frames,
        base_height=height,
        base_width=width,
        audio_pos_embed_max_pos=config["audio_positional_embedding_max_pos"][0],
        rope_theta=config["positional_embedding_theta"],
        rope_double_precision=config["frequencies_precision"] == "float64",
        cross_attn_timestep_scale_multiplier=config["av_ca_timestep_scale_multiplier"],
    )
    return _frozen(model)


def _connectors(config: Mapping[str, Any], text: Any) -> Any:
    from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors

    layers, registers = config["connector_num_layers"], config["connector_num_learnable_registers"]
    model = LTX2TextConnectors(
        caption_channels=config["caption_channels"],
        text_proj_in_factor=text.num_hidden_layers + 1,
        video_connector_num_attention_heads=config["connector_num_attention_heads"],
        video_connector_attention_head_dim=config["connector_attention_head_dim"],
        video_connector_num_layers=layers,
        video_connector_num_learnable_registers=registers,
        audio_connector_num_attention_heads=config["audio_connector_num_attention_heads"],
        audio_connector_attention_head_dim=config["audio_connector_attention_head_dim"],
        audio_connector_num_layers=layers,
        audio_connector_num_learnable_registers=registers,
        connector_rope_base_seq_len=config["connector_positional_embedding_max_pos"][0],
        rope_theta=config["positional_embedding_theta"],
        rope_double_precision=config["frequencies_precision"] == "float64",
        rope_type=config["rope_type"],
    )
    return _frozen(model)


def _video_vae(config: Mapping[str, Any]) -> Any:
    from diffusers.models.autoencoders import AutoencoderKLLTX2Video

    # From the input to the latents, and for the decoder from its output to the latents, the types excepted.
    downs = [block for block in config["encoder_blocks"] if block[0] != "res_x"]
    ups = [block for block in config["decoder_blocks"] if block[0] != "res_x"]
    kinds = {"space": "spatial", "time": "temporal", "all": "spatiotemporal"}
    model = AutoencoderKLLTX2Video(
        in_channels=config["in_channels"],
        out_channels=config["out_channels"],
        latent_channels=config["latent_channels"],
        patch_size=config["patch_size"],
        block_out_channels=_widths(config["latent_channels"], downs),
        layers_per_block=_layers(config["encoder_blocks"]),
        downsample_type=tuple(kinds[name.split("_")[1]] for name, _ in downs),
        decoder_block_out_channels=_widths(config["decoder_base_channels"], ups),
        decoder_layers_per_block=_layers(config["decoder_blocks"]),
        upsample_type=tuple(kinds[name.split("_")[1]] for name, _ in reversed(ups)),
        upsample_residual=tuple(block["residual"] for _, block in ups),
        upsample_factor=tuple(block["multiplier"] for _, block in ups),
        decoder_causal=config["causal_decoder"],
        timestep_conditioning=config["timestep_conditioning"],
        # Without these it counts every block as halving all three axes.
        spatial_compression_ratio=32,
        temporal_compression_ratio=8,
    )
    return _frozen(model)


def _widths(first: int, blocks: list[Any]) -> tuple[int, ...]:
    return tuple(first * math.prod(block["multiplier"] for _, block in blocks[: n + 1]) for n in range(len(blocks)))


def _layers(blocks: list[Any]) -> tuple[int, ...]:
    return tuple(block["num_layers"] for name, block in blocks if name == "res_x")


def _audio_vae(config: Mapping[str, Any]) -> Any:
    from diffusers.models.autoencoders import AutoencoderKLLTX2Audio

    sizes, sound = config["model"]["params"]["ddconfig"], config["preprocessing"]["stft"]
    same = ("ch_mult", "num_res_blocks", "in_channels", "norm_type", "causality_axis", "mel_bins", "double_z")
    model = AutoencoderKLLTX2Audio(
        **{name: sizes[name] for name in same},
        base_channels=sizes["ch"],
        output_channels=sizes["out_ch"],
        latent_channels=sizes["z_channels"],
        sample_rate=config["model"]["params"]["sampling_rate"],
        mel_hop_length=sound["hop_length"],
    )
    # diffusers makes them as long as the base channels are many, which is so in the released model only.
    for name in ("latents_mean", "latents_std"):
        model.register_buffer(name, torch.empty(sizes["z_channels"] * sizes["mel_bins"] // 4))
    return _frozen(model)


def _vocoder(config: Mapping[str, Any]) -> Any:
    from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder

    model = LTX2Vocoder(
        hidden_channels=config["upsample_initial_channel"],
        upsample_kernel_sizes=config["upsample_kernel_sizes"],
        upsample_factors=config["upsample_rates"],
        resnet_kernel_sizes=config["resblock_kernel_sizes"],
        resnet_dilations=config["resblock_dilation_sizes"],
        output_sampling_rate=config["output_sampling_rate"],
    )
    return _frozen(model)


def decibels(ours: Tensor, other: Tensor) -> float:
    """Peak signal-to-noise ratio of pictures in 0..1."""
    return -10 * math.log10(float((ours.double() - other.double()).square().mean()) + 1e-20)


def test_diffusers_makes_the_same_clip(job: Job, parts: tiny_ltx2.Parts) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.pipelines.ltx2.pipeline_ltx2 import LTX2Pipeline

    request, sampler, noise = job.requests[0], job.config.sampler, noise_of(job)
    assert sampler.video.cfg_scale > 1 and sampler.audio.cfg_scale > 1 and noise.audio is not None
    ours = generate(job)
    pipeline = diffusers_pipeline(parts, LTX2Pipeline, FlowMatchEulerDiscreteScheduler())
    video, audio = (
        {"guidance_scale": s.cfg_scale, "stg_scale": s.stg_scale, "modality_scale": s.modality_scale,
         "guidance_rescale": s.rescale_scale}
        for s in (sampler.video, sampler.audio)
    )  # fmt: skip
    frames, waveform = pipeline(
        **video,
        **{f"audio_{name}": value for name, value in audio.items()},
        spatio_temporal_guidance_blocks=list(sampler.video.stg_blocks),
        prompt=request.prompt,
        negative_prompt=request.negative_prompt,
        height=request.height,
        width=request.width,
        num_frames=request.num_frames,
        frame_rate=request.fps,
        sigmas=build_sigmas(STEPS, schedule=sampler.schedule, video_tokens=noise.video.shape[1])[:-1].tolist(),
        max_sequence_length=job.config.model.text_encoder.max_length,
        latents=noise.video.clone(),
        # That pipeline normalizes audio latents that it is given, also packed ones.
        audio_latents=noise.audio * parts.audio_vae.latents_std + parts.audio_vae.latents_mean,
        return_dict=False,
        output_type="np",
    )  # fmt: skip
    pixels = ((ours.frames[0].permute(1, 2, 3, 0) + 1) / 2).clamp(0, 1)
    assert pixels.std() > 0.02, "there is nothing to see"
    assert decibels(pixels, torch.from_numpy(np.asarray(frames[0]))) >= LEAST_PSNR
    assert relative(ours.waveform, waveform[0].float()) <= LARGEST_ERROR


def test_diffusers_makes_the_same_latents(job: Job, parts: tiny_ltx2.Parts) -> None:
    request, sound = job.requests[0], job.architecture.audio_encoder
    size = (request.num_frames, request.height, request.width)
    clip = render([sample_scene(0, 0, "heldout")], *size, request.fps, sound.sample_rate)
    mel = log_mel(clip.waveform, sound)
    for ours, given, vae, shape in (
        ("video_encoder", clip.video, parts.vae, (-1, 1, 1, 1)),
        ("audio_encoder", mel, parts.audio_vae, (2, 1, -1)),
    ):
        mean, std = vae.latents_mean.view(shape), vae.latents_std.view(shape)
        theirs = (vae.encode(given).latent_dist.mean - mean) / std
        assert relative(ltx2._load(job, ours, CPU)(given), theirs) <= LARGEST_ERROR, ours


def test_diffusers_upsamples_the_same() -> None:
    from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel

    config = header(UPSAMPLER)
    same = ("in_channels", "mid_channels", "num_blocks_per_stage", "dims", "spatial_upsample", "temporal_upsample")
    theirs = _frozen(
        LTX2LatentUpsamplerModel(
            **{name: config[name] for name in same},
            rational_spatial_scale=config["spatial_scale"],
            use_rational_resampler=config["rational_resampler"],
        )
    )
    theirs.load_state_dict(load_file(UPSAMPLER))
    ours = LatentUpsampler(upsampler_from_official(config))
    with checkpoint.upsampler_source(checkpoint_files.resolve_upsampler(str(UPSAMPLER))) as source:
        checkpoint.load_module(ours, source, device=CPU, dtype=torch.float32)
    grid = torch.randn(1, config["in_channels"], 3, 2, 2, generator=torch.Generator().manual_seed(0))
    assert relative(ours(grid), theirs(grid)) <= LARGEST_ERROR
