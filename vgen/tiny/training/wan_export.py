"""The trained stages of Wan as a folder that all loaders read: that of a diffusers pipeline."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from vgen.config import FlowSamplerConfig
from vgen.models.wan.config import WanArchitecture
from vgen.tiny.tokenizer import UMT5, save_tokenizer
from vgen.tiny.training.store import load_average, part_of

PIPELINE = "wan-2.2-tiny"

STATISTICS = ("latents_mean", "latents_std")

_DIFFUSERS = "diffusion_pytorch_model.safetensors"


def export(folder: Path, architecture: WanArchitecture, text: Mapping[str, Any], sampler: FlowSamplerConfig) -> None:
    """Write the folder beside the stages' states; weights in bf16, the latents' statistics in the VAE's config."""
    diffusion, vae = load_average(folder, "diffusion"), load_average(folder, "video_vae")
    statistics = {name: vae.pop(name).tolist() for name in STATISTICS}
    out = folder / PIPELINE
    _write_json(out / "model_index.json", model_index())
    _write_component(
        out / "transformer", _DIFFUSERS, part_of(diffusion, "transformer."), transformer_config(architecture)
    )
    _write_component(out / "vae", _DIFFUSERS, vae, {**vae_config(architecture), **statistics})
    _write_component(
        out / "text_encoder",
        "model.safetensors",
        text_encoder_tensors(part_of(diffusion, "text_encoder.")),
        {"architectures": ["UMT5EncoderModel"], **text, "dtype": "bfloat16"},
    )
    save_tokenizer(out / "tokenizer", UMT5)
    _write_json(out / "scheduler" / "scheduler_config.json", scheduler_config(sampler.shift))


def model_index() -> dict[str, Any]:
    return {
        "_class_name": "WanPipeline",
        "boundary_ratio": None,
        "expand_timesteps": True,
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "transformer_2": [None, None],
        "vae": ["diffusers", "AutoencoderKLWan"],
    }


def transformer_config(architecture: WanArchitecture) -> dict[str, Any]:
    return {"_class_name": "WanTransformer3DModel", **asdict(architecture.transformer)}


def vae_config(architecture: WanArchitecture) -> dict[str, Any]:
    """In diffusers' words, without the latents' statistics; ``temperal_downsample`` is their spelling."""
    sizes = {name: value for name, value in asdict(architecture.vae).items() if name not in STATISTICS}
    return {"_class_name": "AutoencoderKLWan", "temperal_downsample": sizes.pop("temporal_downsample"), **sizes}


def text_encoder_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names of ``UMT5EncoderModel``, whose encoder shares the embeddings."""
    return {
        "shared.weight" if name == "embed_tokens.weight" else f"encoder.{name}": tensor
        for name, tensor in tensors.items()
    }


def scheduler_config(shift: float) -> dict[str, Any]:
    return {
        "_class_name": "UniPCMultistepScheduler",
        "num_train_timesteps": 1000,
        "prediction_type": "flow_prediction",
        "use_flow_sigmas": True,
        "flow_shift": shift,
        "solver_order": 2,
        "solver_type": "bh2",
        "predict_x0": True,
        "lower_order_final": True,
        "final_sigmas_type": "zero",
    }


def _write_component(folder: Path, file: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    _write_json(folder / "config.json", config)
    rounded = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    # transformers asks which framework the tensors are of.
    save_file(rounded, folder / file, metadata={"format": "pt"})


def _write_json(path: Path, config: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
