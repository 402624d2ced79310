"""Tiny LTX-2 2.0 and 2.3 checkpoints with random weights, built by the diffusers and transformers classes themselves.

One set of parts is written both as a diffusers folder and as the equivalent official single file, with a Gemma-3 folder
beside them. The official names and config are spelled out here on their own, so that ``vgen``'s tables are tested
against something. Nothing is left at a value that could hide a mistake: gains are not 1, biases and statistics not 0
or 1, tables and registers random, sizes that could be swapped differ.
"""

import atexit
import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

HIDDEN_SIZE, NUM_STATES = 48, 4
"""Of the tiny Gemma: its width, and its hidden states (3 layers and the embeddings)."""

TEXT_LENGTH = 32
"""Tokens per prompt that suit the tiny connectors (a multiple of their 8 registers)."""

Version = Literal["2.0", "2.3"]

_PROMPTS = (
    "A red fox runs through deep snow at sunrise, its breath hanging in the cold air.",
    "Rain on a tin roof; a cat sleeps on the warm windowsill, thunder far away.",
)


@dataclass(frozen=True)
class Parts:
    """The parts of one checkpoint: diffusers modules, transformers' Gemma-3 and its tokenizer, all fp32."""

    transformer: Any
    connectors: Any
    vae: Any
    audio_vae: Any
    vocoder: Any
    text_encoder: Any
    tokenizer: Any


@dataclass(frozen=True)
class Checkpoints:
    """One set of parts and where it is written: diffusers folder, official file, Gemma-3 folder."""

    parts: Parts
    diffusers: Path
    official: Path
    gemma: Path


def tiny_checkpoints(version: Version = "2.0") -> Checkpoints:
    """The checkpoints of seed 0, written once per test run; read them, do not change them."""
    return _checkpoints(version)


@cache
def _checkpoints(version: Version) -> Checkpoints:
    folder = Path(tempfile.mkdtemp(prefix="tiny_ltx2_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    parts = build_parts(version=version)
    name = {"2.0": "ltx-2-tiny.safetensors", "2.3": "ltx-2.3-tiny.safetensors"}[version]
    return Checkpoints(
        parts=parts,
        diffusers=write_diffusers(parts, folder / "diffusers"),
        official=write_official(parts, folder / "official" / name),
        gemma=write_gemma(parts, folder / "gemma"),
    )


def build_parts(seed: int = 0, version: Version = "2.0") -> Parts:
    """All parts with random weights that depend on ``seed``."""
    parts = Parts(
        transformer=_build_transformer(version),
        connectors=_build_connectors(version),
        vae=_build_vae(version),
        audio_vae=_build_audio_vae(),
        vocoder=_build_vocoder() if version == "2.0" else _build_extended_vocoder(),
        text_encoder=build_gemma(),
        tokenizer=build_tokenizer(),
    )
    modules = (parts.transformer, parts.connectors, parts.vae, parts.audio_vae, parts.vocoder, parts.text_encoder)
    for index, module in enumerate(modules):
        randomise(module, seed * len(modules) + index)
    return parts


def build_upsampler(
    *, spatial: bool = True, temporal: bool = False, scale: float = 2.0, rational: bool = True, seed: int = 0
) -> Any:
    """A latent upsampler for the tiny video VAE; the 2.0 files are rational, the 2.3 ones of scale 2 are not."""
    from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel

    model = LTX2LatentUpsamplerModel(
        in_channels=16,
        mid_channels=32,
        num_blocks_per_stage=2,
        spatial_upsample=spatial,
        temporal_upsample=temporal,
        rational_spatial_scale=scale,
        use_rational_resampler=rational,
    )
    randomise(model, seed)
    return model


def randomise(module: nn.Module, seed: int) -> None:
    """Draw every parameter and persistent buffer: gains about 1, standard deviations positive, no bias zero.

    Filters and spectral bases stay what they are built as, or become what training stores, up to some noise.
    """
    generator = torch.Generator().manual_seed(seed)
    module.requires_grad_(False).eval()
    for name, tensor in module.state_dict(keep_vars=True).items():
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith("latents_std"):
            noise = 0.5 + torch.rand(tensor.shape, generator=generator)
        elif name.endswith(("latents_mean", ".alpha", ".beta")) or "scale_shift_table" in name:
            noise = 0.3 * noise
        elif name.endswith((".filter", ".kernel")):
            noise = tensor * (1 + 0.1 * noise)
        elif name.endswith("_basis"):
            noise = _basis(name, tensor.shape) * (1 + 0.1 * noise)
        elif tensor.ndim >= 2 and "registers" not in name:
            noise = noise / tensor[0].numel() ** 0.5
            if name in _QUIET:
                noise = 0.01 * noise
        elif "norm" in name and "layernorm" not in name and "self_attn" not in name:
            noise = 1 + 0.2 * noise
        elif tensor.ndim == 1:
            noise = 0.1 * noise
        tensor.copy_(noise)


_QUIET = ("vocoder.conv_out.weight", "bwe_generator.conv_out.weight")
"""Of the 2.3 vocoder: so that its waveforms stay inside -1 to 1, where nothing is clamped."""


def _basis(name: str, shape: torch.Size) -> Tensor:
    """Windowed cosines and sines [2 * frequencies, 1, samples], or triangles [bins, frequencies] without slopes."""
    if name.endswith("mel_basis"):
        distance = torch.arange(shape[1]) / shape[1] - (torch.arange(shape[0])[:, None] + 0.5) / shape[0]
        return (1.5 / shape[0] - distance.abs()).clamp(min=0)
    samples = torch.arange(shape[2])
    angles = 2 * torch.pi / shape[2] * samples * torch.arange(shape[0] // 2)[:, None]
    return torch.hann_window(shape[2]) * torch.cat([angles.cos(), -angles.sin()])[:, None]


def _build_transformer(version: Version) -> Any:
    new = version == "2.3"
    from diffusers.models.transformers import LTX2VideoTransformer3DModel

    return LTX2VideoTransformer3DModel(
        in_channels=16,
        out_channels=16,
        num_attention_heads=4,
        attention_head_dim=16,
        cross_attention_dim=64,
        pos_embed_max_pos=20,
        base_height=512,
        base_width=1024,
        audio_in_channels=32,
        audio_out_channels=32,
        audio_num_attention_heads=4,
        audio_attention_head_dim=8,
        audio_cross_attention_dim=32,
        audio_pos_embed_max_pos=24,
        num_layers=2,
        caption_channels=HIDDEN_SIZE,
        rope_double_precision=True,
        rope_type="split",
        timestep_scale_multiplier=1000,
        cross_attn_timestep_scale_multiplier=500,
        gated_attn=new,
        audio_gated_attn=new,
        cross_attn_mod=new,
        audio_cross_attn_mod=new,
        perturbed_attn=new,
        use_prompt_embeddings=not new,
    )


def _build_connectors(version: Version) -> Any:
    """2.0: both connectors as wide as Gemma's states. 2.3: each as wide as its stream of the transformer."""
    from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors

    new = version == "2.3"
    return LTX2TextConnectors(
        caption_channels=HIDDEN_SIZE,
        text_proj_in_factor=NUM_STATES,
        video_connector_num_attention_heads=4,
        video_connector_attention_head_dim=16 if new else 12,
        video_connector_num_layers=2,
        video_connector_num_learnable_registers=8,
        video_gated_attn=new,
        audio_connector_num_attention_heads=4 if new else 6,
        audio_connector_attention_head_dim=8,
        audio_connector_num_layers=1,
        audio_connector_num_learnable_registers=8,
        audio_gated_attn=new,
        connector_rope_base_seq_len=64,
        rope_double_precision=True,
        rope_type="split",
        per_modality_projections=new,
        video_hidden_dim=64,
        audio_hidden_dim=32,
        proj_bias=new,
    )


def _build_vae(version: Version) -> Any:
    from diffusers.models.autoencoders import AutoencoderKLLTX2Video

    common = {
        "latent_channels": 16,
        "encoder_causal": True,
        "decoder_causal": False,
        "spatial_compression_ratio": 32,
        "temporal_compression_ratio": 8,
        "encoder_spatial_padding_mode": "zeros",
    }
    if version == "2.0":
        return AutoencoderKLLTX2Video(
            **common,
            block_out_channels=(32, 64, 128, 256),
            decoder_block_out_channels=(16, 32, 64),
            layers_per_block=(1, 1, 1, 1, 1),
            decoder_layers_per_block=(1, 1, 2, 3),
            decoder_spatial_padding_mode="reflect",
        )
    return AutoencoderKLLTX2Video(
        **common,
        block_out_channels=(32, 64, 128, 128),
        decoder_block_out_channels=(16, 32, 32, 64),
        layers_per_block=(1, 2, 1, 1, 2),
        decoder_layers_per_block=(1, 2, 1, 1, 2),
        decoder_spatial_padding_mode="zeros",
        decoder_spatio_temporal_scaling=(True,) * 4,
        decoder_inject_noise=(False,) * 5,
        upsample_type=("spatiotemporal", "spatiotemporal", "temporal", "spatial"),
        upsample_residual=(False,) * 4,
        upsample_factor=(2, 2, 1, 2),
    )


def _build_audio_vae() -> Any:
    from diffusers.models.autoencoders import AutoencoderKLLTX2Audio

    return AutoencoderKLLTX2Audio(base_channels=32, num_res_blocks=1, latent_channels=2, mel_bins=64)


def _build_vocoder() -> Any:
    from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder

    return LTX2Vocoder(hidden_channels=64, resnet_kernel_sizes=[3, 5], resnet_dilations=[[1, 3, 5], [1, 2, 3]])


def _build_extended_vocoder() -> Any:
    from diffusers.pipelines.ltx2.vocoder import LTX2VocoderWithBWE

    return LTX2VocoderWithBWE(
        hidden_channels=64,
        upsample_factors=[5, 4, 2, 2, 2],
        upsample_kernel_sizes=[11, 8, 4, 4, 4],
        resnet_kernel_sizes=[3, 5],
        resnet_dilations=[[1, 3, 5], [1, 2, 3]],
        bwe_hidden_channels=32,
        bwe_resnet_kernel_sizes=[3],
        bwe_resnet_dilations=[[1, 3, 5]],
    )


def gemma_text_config() -> dict[str, Any]:
    """A tiny ``text_config`` with local and global layers, and a window shorter than the prompts."""
    return {
        "model_type": "gemma3_text",
        "vocab_size": 512,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 96,
        "num_hidden_layers": NUM_STATES - 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 20,
        "max_position_embeddings": 1024,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }


def build_gemma() -> Any:
    """transformers' multimodal Gemma-3, of which LTX-2 reads the text model."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = Gemma3Config(text_config=gemma_text_config(), vision_config=vision, mm_tokens_per_image=4)
    return Gemma3ForConditionalGeneration(config)


def build_tokenizer() -> Any:
    """A byte-pair tokenizer in Gemma's style (spaces as U+2581, special ids 0 to 3), trained on two sentences."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    backend.decoder = decoders.Replace("▁", " ")
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    backend.train_from_iterator(_PROMPTS, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=1024, padding_side="left", **names)


def write_diffusers(parts: Parts, folder: Path) -> Path:
    """The diffusers folder of ``parts``, with text encoder, tokenizer and scheduler, as its pipeline saves it."""
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.pipelines.ltx2.pipeline_ltx2 import LTX2Pipeline

    pipeline = LTX2Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, base_shift=0.95, max_shift=2.05),
        vae=parts.vae,
        audio_vae=parts.audio_vae,
        text_encoder=parts.text_encoder,
        tokenizer=parts.tokenizer,
        connectors=parts.connectors,
        transformer=parts.transformer,
        vocoder=parts.vocoder,
    )
    pipeline.save_pretrained(folder)
    return folder


def write_official(parts: Parts, path: Path) -> Path:
    """The official single file of ``parts``: tensors under the official names, the config in the metadata."""
    path.parent.mkdir(parents=True, exist_ok=True)
    version = {"model_version": "2.3.0"} if _version(parts) == "2.3" else {}
    save_file(official_tensors(parts), path, metadata={"config": json.dumps(official_config(parts)), **version})
    return path


def write_official_upsampler(upsampler: Any, path: Path) -> Path:
    """The official file of a latent upsampler: diffusers' names, the config in the metadata."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(upsampler.state_dict(), path, metadata={"config": json.dumps(official_upsampler_config(upsampler))})
    return path


def official_upsampler_config(upsampler: Any) -> dict[str, Any]:
    config = upsampler.config
    same = ("in_channels", "mid_channels", "num_blocks_per_stage", "dims", "spatial_upsample", "temporal_upsample")
    return {
        "_class_name": "LatentUpsampler",
        **{name: config[name] for name in same},
        "spatial_scale": config.rational_spatial_scale,
        "rational_resampler": config.use_rational_resampler,
    }


def write_gemma(parts: Parts, folder: Path) -> Path:
    """The Gemma-3 folder of ``parts``, as transformers saves it: config, weights and tokenizer in one place."""
    parts.text_encoder.save_pretrained(folder)
    parts.tokenizer.save_pretrained(folder)
    return folder


def _version(parts: Parts) -> Version:
    return "2.3" if parts.transformer.config.gated_attn else "2.0"


def official_tensors(parts: Parts) -> dict[str, Tensor]:
    """Every tensor that the official file holds, encoders and unused statistics included."""
    tensors = used_tensors(parts)
    if _version(parts) == "2.3":
        return tensors
    channels = parts.vae.config.latent_channels
    for offset, name in enumerate(("channel", "mean-of-stds", "mean-of-stds_over_std-of-means")):
        tensors[f"vae.per_channel_statistics.{name}"] = torch.arange(channels, dtype=torch.float32) + offset
    return tensors


def used_tensors(parts: Parts) -> dict[str, Tensor]:
    """The tensors of the diffusers modules under their official names, not copied."""
    return {
        **_renamed(parts.transformer, "model.diffusion_model.", _transformer_name),
        **_renamed(parts.connectors, "", _connector_name),
        **_renamed(parts.vae, "vae.", _vae_name),
        **_renamed(parts.audio_vae, "audio_vae.", _statistics_name),
        **_renamed(parts.vocoder, "vocoder.", _vocoder_name),
    }


def _renamed(module: nn.Module, prefix: str, rename: Any) -> dict[str, Tensor]:
    return {prefix + rename(name): tensor.contiguous() for name, tensor in module.state_dict().items()}


def _transformer_name(name: str) -> str:
    name = name.replace("norm_q.", "q_norm.").replace("norm_k.", "k_norm.")
    name = re.sub(r"^(audio_)?proj_in\.", r"\1patchify_proj.", name)
    name = re.sub(r"^(audio_)?time_embed\.", r"\1adaln_single.", name)
    name = re.sub(r"^av_cross_attn_(video|audio)_scale_shift\.", r"av_ca_\1_scale_shift_adaln_single.", name)
    name = re.sub(r"^av_cross_attn_(?:video|audio)_(a2v|v2a)_gate\.", r"av_ca_\1_gate_adaln_single.", name)
    name = re.sub(r"^(audio_)?prompt_adaln\.", r"\1prompt_adaln_single.", name)
    return re.sub(r"(video|audio)_a2v_cross_attn_scale_shift_table$", r"scale_shift_table_a2v_ca_\1", name)


def _connector_name(name: str) -> str:
    if "text_proj_in." in name:
        return "text_embedding_projection." + name.replace("text_proj_in.", "aggregate_embed.")
    name = name.replace("norm_q.", "q_norm.").replace("norm_k.", "k_norm.")
    name = name.replace(".transformer_blocks.", ".transformer_1d_blocks.")
    return "model.diffusion_model." + re.sub(r"^(video|audio)_connector\.", r"\1_embeddings_connector.", name)


def _statistics_name(name: str) -> str:
    statistics = {"latents_mean": "mean-of-means", "latents_std": "std-of-means"}
    return f"per_channel_statistics.{statistics[name]}" if name in statistics else name


def _vae_name(name: str) -> str:
    half, _, rest = _statistics_name(name).partition(".")
    if half not in ("encoder", "decoder"):
        return _statistics_name(name)

    def level(match: re.Match[str]) -> str:
        # Encoder: residual, then down. Decoder: after the middle block at 0, up, then residual.
        resampler = match[3] is not None
        position = 2 * int(match[2]) + (resampler if half == "encoder" else 2 - resampler)
        return f"{match[1]}_blocks.{position}."

    rest = re.sub(r"^(down|up)_blocks\.(\d+)\.((?:down|up)samplers\.0\.)?", level, rest)
    rest = rest.replace("mid_block.", "up_blocks.0." if half == "decoder" else "down_blocks.8.")
    return f"{half}.{rest}".replace(".resnets.", ".res_blocks.")


def _vocoder_name(name: str) -> str:
    for theirs, official in (("conv_in.", "conv_pre."), ("conv_out.", "conv_post."), ("upsamplers.", "ups.")):
        name = name.replace(theirs, official)
    name = name.replace("resnets.", "resblocks.").replace("act_out.", "act_post.")
    return name.replace(".downsample.filter", ".downsample.lowpass.filter")


def official_config(parts: Parts) -> dict[str, Any]:
    """The ``config`` JSON of the official file, with the keys that released files have."""
    return {
        "transformer": {**_TRANSFORMER_CONSTANTS, **_official_transformer(parts.transformer.config, parts.connectors)},
        "vae": _official_vae(parts.vae.config),
        "audio_vae": _official_audio_vae(parts.audio_vae.config),
        "vocoder": _official_vocoder(parts.vocoder.config),
        "scheduler": {
            "_class_name": "RectifiedFlowScheduler",
            "num_train_timesteps": 1000,
            "sampler": "LinearQuadratic",
        },
    }


_TRANSFORMER_CONSTANTS = {
    "_class_name": "AVTransformer3DModel",
    "activation_fn": "gelu-approximate",
    "attention_bias": True,
    "double_self_attention": False,
    "dropout": 0.0,
    "norm_elementwise_affine": False,
    "num_embeds_ada_norm": 1000,
    "num_vector_embeds": None,
    "only_cross_attention": False,
    "cross_attention_norm": True,
    "upcast_attention": False,
    "use_linear_projection": False,
    "qk_norm": "rms_norm",
    "standardization_norm": "rms_norm",
    "positional_embedding_type": "rope",
    "use_audio_video_cross_attention": True,
    "share_ff": False,
    "av_cross_ada_norm": True,
    "use_embeddings_connector": True,
    "use_middle_indices_grid": True,
    "rope_type": "split",
}


_TRANSFORMER_2_3 = {
    "apply_gated_attention": True,
    "connector_apply_gated_attention": True,
    "cross_attention_adaln": True,
    "caption_proj_before_connector": True,
    "caption_projection_first_linear": False,
    "caption_projection_second_linear": False,
    "caption_proj_input_norm": False,
    "text_encoder_norm_type": "per_token_rms",
}


def _official_transformer(config: Any, connectors: Any) -> dict[str, Any]:
    text = connectors.config
    return {
        # A 2.3 file has no number of audio heads: it is the video connector's.
        **(_TRANSFORMER_2_3 if config.gated_attn else _audio_connector_heads(text)),
        "num_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "attention_head_dim": config.attention_head_dim,
        "audio_num_attention_heads": config.audio_num_attention_heads,
        "audio_attention_head_dim": config.audio_attention_head_dim,
        "cross_attention_dim": config.cross_attention_dim,
        "audio_cross_attention_dim": config.audio_cross_attention_dim,
        "in_channels": config.in_channels,
        "out_channels": config.out_channels,
        "audio_in_channels": config.audio_in_channels,
        "audio_out_channels": config.audio_out_channels,
        "caption_channels": config.caption_channels,
        "norm_eps": config.norm_eps,
        "positional_embedding_theta": config.rope_theta,
        "positional_embedding_max_pos": [config.pos_embed_max_pos, config.base_height, config.base_width],
        "audio_positional_embedding_max_pos": [config.audio_pos_embed_max_pos],
        "frequencies_precision": "float64" if config.rope_double_precision else "float32",
        "timestep_scale_multiplier": config.timestep_scale_multiplier,
        "av_ca_timestep_scale_multiplier": config.cross_attn_timestep_scale_multiplier,
        "connector_num_layers": text.video_connector_num_layers,
        "connector_num_attention_heads": text.video_connector_num_attention_heads,
        "connector_attention_head_dim": text.video_connector_attention_head_dim,
        "audio_connector_num_layers": text.audio_connector_num_layers,
        "audio_connector_attention_head_dim": text.audio_connector_attention_head_dim,
        "connector_num_learnable_registers": text.video_connector_num_learnable_registers,
        "connector_positional_embedding_max_pos": [text.connector_rope_base_seq_len],
    }


def _audio_connector_heads(text: Any) -> dict[str, Any]:
    return {"audio_connector_num_attention_heads": text.audio_connector_num_attention_heads}


def _official_vae(config: Any) -> dict[str, Any]:
    # Only a 2.3 file has a padding mode, and it holds for encoder and decoder.
    padding = {"spatial_padding_mode": "zeros"} if config.decoder_spatial_padding_mode == "zeros" else {}
    return {
        "_class_name": "CausalVideoAutoencoder",
        "dims": 3,
        "in_channels": config.in_channels,
        "out_channels": config.out_channels,
        "latent_channels": config.latent_channels,
        "encoder_blocks": _official_encoder_blocks(config),
        "decoder_blocks": _official_decoder_blocks(config),
        "norm_layer": "pixel_norm",
        "patch_size": config.patch_size,
        "latent_log_var": "uniform",
        "causal_decoder": config.decoder_causal,
        "timestep_conditioning": config.timestep_conditioning,
        "decoder_base_channels": config.decoder_block_out_channels[0] // config.upsample_factor[0],
        **padding,
    }


def _official_encoder_blocks(config: Any) -> list[Any]:
    names = {"spatial": "compress_space_res", "temporal": "compress_time_res", "spatiotemporal": "compress_all_res"}
    widths = (config.latent_channels, *config.block_out_channels)
    blocks: list[Any] = []
    for level, type_ in enumerate(config.downsample_type):
        blocks.append(["res_x", {"num_layers": config.layers_per_block[level]}])
        blocks.append([names[type_], {"multiplier": widths[level + 1] // widths[level]}])
    return [*blocks, ["res_x", {"num_layers": config.layers_per_block[-1]}]]


def _official_decoder_blocks(config: Any) -> list[Any]:
    """From the output to the latents, as diffusers lists its levels, the types of upsampling excepted."""
    names = {"spatial": "compress_space", "temporal": "compress_time", "spatiotemporal": "compress_all"}
    blocks: list[Any] = [["res_x", {"num_layers": config.decoder_layers_per_block[0]}]]
    for level, type_ in enumerate(reversed(config.upsample_type)):
        up = {"multiplier": config.upsample_factor[level]}
        if config.upsample_residual[level]:
            up["residual"] = True
        blocks.append([names[type_], up])
        blocks.append(["res_x", {"num_layers": config.decoder_layers_per_block[level + 1]}])
    return blocks


def _official_audio_vae(config: Any) -> dict[str, Any]:
    sizes = {
        "double_z": True,
        "mel_bins": config.mel_bins,
        "z_channels": config.latent_channels,
        "resolution": config.resolution,
        "in_channels": config.in_channels,
        "out_ch": config.output_channels,
        "ch": config.base_channels,
        "ch_mult": list(config.ch_mult),
        "num_res_blocks": config.num_res_blocks,
        "attn_resolutions": [],
        "dropout": 0.0,
        "mid_block_add_attention": False,
        "norm_type": "pixel",
        "causality_axis": "height",
    }
    return {
        "model": {"params": {"ddconfig": sizes, "sampling_rate": config.sample_rate}},
        "preprocessing": {
            "stft": {"filter_length": 1024, "hop_length": config.mel_hop_length, "win_length": 1024, "causal": True},
            "mel": {"n_mel_channels": config.mel_bins, "mel_fmin": 0, "mel_fmax": 8000},
        },
    }


def _official_vocoder(config: Any) -> dict[str, Any]:
    if "bwe_hidden_channels" not in config:
        return {**_official_generator(config, ""), "resblock": "1"}
    amp = {"resblock": "AMP1", "activation": "snakebeta", "use_tanh_at_final": False, "use_bias_at_final": False}
    rates = {"input_sampling_rate": config.input_sampling_rate, "output_sampling_rate": config.output_sampling_rate}
    mel = {"n_fft": config.filter_length, "hop_length": config.hop_length, "num_mels": config.num_mel_channels}
    return {
        "vocoder": {**_official_generator(config, ""), **amp},
        "bwe": {**_official_generator(config, "bwe_"), **amp, **rates, **mel, "apply_final_activation": False},
    }


def _official_generator(config: Any, prefix: str) -> dict[str, Any]:
    return {
        "upsample_initial_channel": config[f"{prefix}hidden_channels"],
        "upsample_rates": list(config[f"{prefix}upsample_factors"]),
        "upsample_kernel_sizes": list(config[f"{prefix}upsample_kernel_sizes"]),
        "resblock_kernel_sizes": list(config[f"{prefix}resnet_kernel_sizes"]),
        "resblock_dilation_sizes": [list(dilations) for dilations in config[f"{prefix}resnet_dilations"]],
        "stereo": True,
    }


def diffusers_configs(folder: Path) -> Mapping[str, Mapping[str, Any]]:
    """``{folder: config.json}`` of a diffusers checkpoint."""
    names = ("transformer", "connectors", "vae", "audio_vae", "vocoder")
    return {name: json.loads((folder / name / "config.json").read_text(encoding="utf-8")) for name in names}
