"""Tiny Wan checkpoints with random weights, built by the classes of diffusers and transformers, in both layouts.

``save_diffusers`` and ``save_original`` write the same tensors for the same variant and seed. The original layout has
no config of its VAE and its encoders, whose sizes are constants of ``vgen.wan_files``: ``tiny_constants`` makes those
the tiny ones. Nothing is left at a value that could hide a mistake, and sizes that could be swapped differ.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanTransformer3DModel
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel, UMT5Config, UMT5EncoderModel

from tests.models.wan import test_wan_keys as names
from tests.models.wan.test_wan_text import write_tokenizer
from vgen import wan_files
from vgen.models.wan import keys
from vgen.models.wan.config import VAE_2_1, VAE_2_2, WanVaeConfig
from vgen.models.wan.encoder_configs import CLIP_VIT_H14, UMT5_XXL

UMT5 = dict(UMT5_XXL) | {"vocab_size": 160, "d_model": 48, "d_kv": 8, "d_ff": 80, "num_heads": 4, "num_layers": 2}
CLIP = dict(CLIP_VIT_H14) | {
    "hidden_size": 40,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 56,
}
VAES = {
    "2.1": dataclasses.replace(VAE_2_1, base_dim=4),
    "2.2": dataclasses.replace(VAE_2_2, base_dim=8, decoder_base_dim=16),
}
TRANSFORMER: Mapping[str, Any] = {
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": UMT5["d_model"],
    "freq_dim": 32,
    "ffn_dim": 96,
    "num_layers": 2,
    # As the published folders have them.
    "image_dim": None,
    "added_kv_proj_dim": None,
    "pos_embed_seq_len": None,
}
WIDTH = 64


@dataclasses.dataclass(frozen=True)
class Variant:
    """What distinguishes a published model; ``original_type``: the original config's ``model_type``."""

    pipeline: str
    original_type: str
    vae: str = "2.1"
    transformer: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    boundary: float | None = None
    expand_timesteps: bool = False
    flow_shift: float = 3.0


VARIANTS: Mapping[str, Variant] = {
    "ti2v": Variant(
        "WanPipeline", "ti2v", "2.2", {"in_channels": 48, "out_channels": 48}, expand_timesteps=True, flow_shift=5.0
    ),
    "t2v_a14b": Variant("WanPipeline", "t2v", boundary=0.875),
    "i2v_a14b": Variant("WanImageToVideoPipeline", "i2v", transformer={"in_channels": 36}, boundary=0.9),
    "t2v_2_1": Variant("WanPipeline", "t2v"),
    "i2v_2_1": Variant(
        "WanImageToVideoPipeline",
        "i2v",
        transformer={"in_channels": 36, "image_dim": CLIP["hidden_size"], "added_kv_proj_dim": WIDTH},
    ),
}


def build(variant: str, seed: int = 0) -> dict[str, Any]:
    """The modules of ``variant`` by the names of their folders, all fp32."""
    sizes = VARIANTS[variant]
    built: dict[str, Any] = {"transformer": WanTransformer3DModel(**TRANSFORMER | sizes.transformer)}
    if sizes.boundary is not None:
        built["transformer_2"] = WanTransformer3DModel(**TRANSFORMER | sizes.transformer)
    built["vae"] = AutoencoderKLWan(**_vae_config(VAES[sizes.vae]))
    built["text_encoder"] = UMT5EncoderModel(UMT5Config(**UMT5))
    if "image_dim" in sizes.transformer:
        built["image_encoder"] = CLIPVisionModel(CLIPVisionConfig(**CLIP))
    for index, module in enumerate(built.values()):
        _randomise(module, 10 * seed + index)
    return built


def save_diffusers(folder: Path, variant: str, seed: int = 0) -> Path:
    """Write ``variant`` as a published diffusers folder is written. Returns ``folder``."""
    modules = build(variant, seed)
    for name, module in modules.items():
        module.save_pretrained(folder / name)
    # Published with 2.2's, an argument that the class does not have.
    _edit_json(folder / "vae" / "config.json", {"clip_output": False} if VARIANTS[variant].vae == "2.2" else {})
    (folder / "tokenizer").mkdir()
    write_tokenizer(folder / "tokenizer")
    shift = VARIANTS[variant].flow_shift
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift)
    scheduler.save_pretrained(folder / "scheduler")
    if "image_encoder" in modules:
        side = CLIP["image_size"]
        processor = CLIPImageProcessor(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
        processor.save_pretrained(folder / "image_processor")
    (folder / "model_index.json").write_text(json.dumps(_model_index(variant, modules), indent=2))
    return folder


def _model_index(variant: str, modules: Mapping[str, Any]) -> dict[str, Any]:
    sizes, none = VARIANTS[variant], [None, None]
    index: dict[str, Any] = {
        "_class_name": sizes.pipeline,
        "_diffusers_version": "0.35.0.dev0",
        "boundary_ratio": sizes.boundary,
        "expand_timesteps": sizes.expand_timesteps,
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "transformer_2": ["diffusers", "WanTransformer3DModel"] if "transformer_2" in modules else none,
        "vae": ["diffusers", "AutoencoderKLWan"],
    }
    if sizes.pipeline == "WanImageToVideoPipeline":
        image = "image_encoder" in modules
        index["image_encoder"] = ["transformers", "CLIPVisionModel"] if image else none
        index["image_processor"] = ["transformers", "CLIPImageProcessor"] if image else none
    return index


def save_original(folder: Path, variant: str, seed: int = 0) -> Path:
    """Write ``variant`` as the original repositories are written, its pickles in fp32. Returns ``folder``."""
    sizes, modules = VARIANTS[variant], build(variant, seed)
    two = "transformer_2" in modules
    for name, place in (("transformer", "high_noise_model" if two else ""), ("transformer_2", "low_noise_model")):
        if name in modules:
            _save_original_transformer(folder / place, modules[name], sizes.original_type)
    vae = original_tensors("vae", modules["vae"])
    torch.save(vae, folder / ("Wan2.2_VAE.pth" if sizes.vae == "2.2" else "Wan2.1_VAE.pth"))
    text_encoder = original_tensors("text_encoder", modules["text_encoder"].encoder)
    torch.save(text_encoder, folder / "models_t5_umt5-xxl-enc-bf16.pth")
    (folder / "google" / "umt5-xxl").mkdir(parents=True)
    write_tokenizer(folder / "google" / "umt5-xxl")
    if "image_encoder" in modules:
        clip = "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth"
        torch.save(original_tensors("image_encoder", modules["image_encoder"]), folder / clip)
    return folder


def _save_original_transformer(folder: Path, module: Any, model_type: str) -> None:
    config = module.config
    folder.mkdir(parents=True, exist_ok=True)
    save_file(original_tensors("transformer", module), folder / "diffusion_pytorch_model.safetensors")
    content = {
        "_class_name": "WanModel",
        "_diffusers_version": "0.33.0",
        "dim": config.num_attention_heads * config.attention_head_dim,
        "eps": config.eps,
        "ffn_dim": config.ffn_dim,
        "freq_dim": config.freq_dim,
        "in_dim": config.in_channels,
        "model_type": model_type,
        "num_heads": config.num_attention_heads,
        "num_layers": config.num_layers,
        "out_dim": config.out_channels,
        "text_len": 512,
    }
    (folder / "config.json").write_text(json.dumps(content, indent=2))


def original_tensors(component: str, module: nn.Module) -> dict[str, Tensor]:
    """The tensors of ``module`` under the names of the original layout, which ``tests/models/wan`` spells out."""
    state = {name: tensor.contiguous() for name, tensor in module.state_dict().items()}
    theirs: Iterable[str]
    if component == "transformer":
        config: Any = module.config
        theirs = names.original_transformer(config.num_layers, config.image_dim is not None, positions=False)
    elif component == "vae":
        two = any("upsampler." in name for name in state)
        component, theirs = ("vae_2_2", names.original_vae_2_2()) if two else ("vae_2_1", names.original_vae_2_1())
    elif component == "text_encoder":
        theirs = names.original_text_encoder(UMT5["num_layers"])
    else:
        return _original_clip(state)
    ours = names.renamed(theirs, component)
    assert sorted(ours.values()) == sorted(state)
    return {name: state[our] for name, our in ours.items()}


def _original_clip(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """With fused projections, leading dims of 1, and some of the text model that lies in the same file."""
    text = {
        "visual.head": (8, 8),
        "log_scale": (),
        "textual.token_embedding.weight": (20, 8),
        "textual.head.0.weight": (4, 8),
    }
    leading = {"visual.cls_embedding": (1, 1), "visual.pos_embedding": (1,)}
    theirs = [name for name in names.original_image_encoder(CLIP["num_hidden_layers"]) if name not in text]
    tensors = {name: torch.zeros(shape) for name, shape in text.items()}
    for name, our in names.renamed(theirs, "image_encoder").items():
        fused = torch.cat([state[part] for part in keys.unfuse(our)])
        tensors[name] = fused.view(*leading.get(name, ()), *fused.shape)
    return tensors


def tiny_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process take the VAEs and the encoders of the original layout for tiny ones."""
    tiny = {"VAE_2_1": VAES["2.1"], "VAE_2_2": VAES["2.2"], "UMT5_XXL": UMT5, "CLIP_VIT_H14": CLIP}
    for name, value in tiny.items():
        monkeypatch.setattr(wan_files, name, value)


def _vae_config(config: WanVaeConfig) -> dict[str, Any]:
    sizes = dataclasses.asdict(config)
    sizes["temperal_downsample"] = sizes.pop("temporal_downsample")
    return {name: list(value) if isinstance(value, tuple) else value for name, value in sizes.items()}


def _randomise(module: nn.Module, seed: int) -> None:
    """Gains about 1, biases and tables not 0, weights that keep the size of what they read."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("gamma") or ("norm" in name and name.endswith("weight")):
            parameter.data = 1 + 0.2 * noise
        elif parameter.ndim > 1 and name.endswith("weight"):
            parameter.data = noise / parameter[0].numel() ** 0.5
        else:
            parameter.data = 0.1 * noise


def _edit_json(path: Path, changes: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(changes), indent=2))
