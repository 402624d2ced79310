"""LTX-2's trained stages as files that all loaders read: the official single file, the upsampler, Gemma's folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from vgen.models.ltx2 import keys
from vgen.models.names import owners, rename
from vgen.tiny.tokenizer import GEMMA, save_tokenizer
from vgen.tiny.training.store import load_average, part_of

CHECKPOINT = "ltx-2-tiny.safetensors"
UPSAMPLER = "ltx-2-tiny-spatial-upscaler-x2.safetensors"
TEXT_ENCODER = "gemma"


def export(
    folder: Path, architecture: Mapping[str, Any], text: Mapping[str, Any], upsampler: Mapping[str, Any]
) -> None:
    """Write the three beside the stages' states; ``architecture`` and ``upsampler`` in the official words."""
    _save(folder / CHECKPOINT, official_tensors(folder), architecture)
    if (folder / "upsampler.safetensors").is_file():
        _save(folder / UPSAMPLER, load_average(folder, "upsampler"), upsampler)
    gemma = folder / TEXT_ENCODER
    gemma.mkdir(exist_ok=True)
    save_file(_halved(part_of(load_average(folder, "diffusion"), "text_encoder.")), gemma / "model.safetensors")
    config = {"architectures": ["Gemma3TextModel"], **text, "dtype": "bfloat16"}
    (gemma / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_tokenizer(gemma, GEMMA)


def official_tensors(folder: Path) -> dict[str, Tensor]:
    """All components of the stages in ``folder`` under their names in an official file."""
    diffusion, audio = load_average(folder, "diffusion"), load_average(folder, "audio_vae")
    components = {
        "transformer": part_of(diffusion, "transformer."),
        **{name: part_of(diffusion, f"connectors.{child}.") for child, name in keys.CONNECTORS.items()},
        **video_components(load_average(folder, "video_vae")),
        "audio_encoder": part_of(audio, "encoder."),
        "audio_decoder": part_of(audio, "decoder."),
        "vocoder": load_average(folder, "vocoder"),
    }
    return {
        official_name(component, name): tensor
        for component, tensors in components.items()
        for name, tensor in tensors.items()
    }


def video_components(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """diffusers' video VAE as our encoder and decoder."""
    layouts = {name: keys.DIFFUSERS[name] for name in ("video_encoder", "video_decoder")}
    components: dict[str, dict[str, Tensor]] = {name: {} for name in layouts}
    for name, tensor in tensors.items():
        for component, prefix in owners(name, layouts).items():
            components[component][rename(name, layouts[component], prefix)] = tensor
    return components


def official_name(component: str, name: str) -> str:
    """What our module's tensor ``name`` is called in an official file."""
    prefixes = keys.OFFICIAL[component].prefixes
    whole = [theirs for theirs, ours in prefixes.items() if ours == name]
    return whole[0] if whole else next(theirs for theirs, ours in prefixes.items() if not ours) + name


def _save(path: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    save_file(_halved(tensors), path, metadata={"config": json.dumps(config)})


def _halved(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """bf16; the latents' statistics keep their bits, which shift every frame alike."""
    return {
        name: (tensor if "per_channel_statistics" in name else tensor.to(torch.bfloat16)).contiguous()
        for name, tensor in tensors.items()
    }
