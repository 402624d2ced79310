"""``task=preflight``: the job at hand made small, so that every stage of its plan runs on CPU ranks within a minute.

What decides whether a plan works stays: the family and its switches, the number of heads, the guidance passes, the
inputs, the ranks, how the VAE is shared. Widths, depths, sizes, steps and prompts become few, the weights random.
Needs no torch.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vgen.config import Config, FlowSamplerConfig, GuidanceConfig, ModelConfig, SamplerConfig, VaeConfig
from vgen.families import family_of
from vgen.models.wan.config import VAES
from vgen.parallel.plans import ParallelPlan
from vgen.requests import Request
from vgen.typed import ConfigurationError

LAYERS, HEAD_DIM, AUDIO_HEAD_DIM, STEPS = 2, 16, 8, 2
LINES = 4
"""Latents along height and width, where the plan needs no more."""
TILE_SIZE, TILE_OVERLAP, TILE_FRAMES, TILE_FRAMES_OVERLAP = 64, 32, 16, 8
"""Several tiles of a clip of that size, where it is decoded in tiles."""
PROMPT = 16
"""Characters that are left of a prompt: random weights read bytes."""
CLIP = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}


def tiny_model(config: Config) -> str:
    """The option of ``model`` whose widths a preflight takes."""
    if config.model.family == "wan":
        return "wan_tiny"
    return "ltx2_tiny" if config.model.version == "2.0" else "ltx2_3_tiny"


def shrink(
    config: Config, requests: tuple[Request, ...], plan: ParallelPlan, tiny: Mapping[str, Any]
) -> tuple[Config, tuple[Request, ...]]:
    """The small job; ``tiny``: the settings of ``tiny_model``. One prompt for each replica is left.

    Raises:
        ConfigurationError: the model has no sizes in its configuration.
    """
    if config.model.architecture is None:
        raise ConfigurationError(
            f"model={config.model.name} has no sizes for task=preflight; set model.architecture as in conf/model"
        )
    small = replace(
        config,
        model=_shrink_model(config.model, tiny),
        sampler=_shrink_sampler(config),
        quant=replace(config.quant, mode="fp32"),
        graph=replace(config.graph, mode="eager"),
        device="cpu",
    )
    family = family_of(small)
    architecture = family.architecture_of(small, None)
    latent = requests[0].height // family.limits(config, requests[:1], architecture).latent_height
    time = family.size_rule(architecture).time
    kept = tuple(
        _shrink_request(request, config, plan, latent=latent, time=time) for request in requests[: plan.data_size]
    )
    request = replace(config.request, height=kept[0].height, width=kept[0].width, num_frames=kept[0].num_frames)
    return replace(small, request=request), kept


def _shrink_model(model: ModelConfig, tiny: Mapping[str, Any]) -> ModelConfig:
    assert model.architecture is not None
    architecture = _merged(model.architecture, tiny["architecture"])
    heads = model.architecture["transformer"]["num_attention_heads"]
    transformer = {
        **architecture["transformer"],
        "num_layers": LAYERS,
        "num_attention_heads": heads,
        "attention_head_dim": HEAD_DIM,
    }
    if model.family == "ltx2":
        transformer |= {
            "audio_num_attention_heads": heads,
            "audio_attention_head_dim": AUDIO_HEAD_DIM,
            "cross_attention_dim": heads * HEAD_DIM,
            "audio_cross_attention_dim": heads * AUDIO_HEAD_DIM,
        }
        if model.version == "2.3":  # whose connectors are as wide as the streams
            transformer |= {
                "connector_num_attention_heads": heads,
                "connector_attention_head_dim": HEAD_DIM,
                "audio_connector_attention_head_dim": AUDIO_HEAD_DIM,
            }
    else:
        transformer["ffn_dim"] = 128
        if transformer.get("image_dim"):
            transformer |= {"image_dim": CLIP["hidden_size"], "added_kv_proj_dim": heads * HEAD_DIM}
            architecture["image_encoder"] = CLIP
        architecture["vae"] = _small_vae(model.architecture["vae"])
    return replace(
        model,
        weights="random",
        checkpoint=None,
        architecture={**architecture, "transformer": transformer},
        text_encoder=replace(
            model.text_encoder,
            checkpoint=None,
            max_length=tiny["text_encoder"]["max_length"],
            architecture=dict(tiny["text_encoder"]["architecture"]),
        ),
        vae=_shrink_vae(model.vae),
        attention="sdpa",
    )


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        nested = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merged(merged[key], value) if nested else value
    return merged


def _small_vae(vae: str | Mapping[str, Any]) -> dict[str, Any]:
    """Wan's VAE, narrow, in the words of its ``config.json``."""
    narrow = {"base_dim": 8, "num_res_blocks": 1}
    if not isinstance(vae, str):
        return {**vae, **narrow}
    sizes = dataclasses.asdict(VAES[vae])
    if sizes["decoder_base_dim"] is not None:
        narrow["decoder_base_dim"] = 8
    return {"temperal_downsample": sizes.pop("temporal_downsample"), **sizes, **narrow}


def _shrink_vae(vae: VaeConfig) -> VaeConfig:
    small = replace(vae, tile_size=TILE_SIZE, tile_overlap=TILE_OVERLAP)
    if vae.tile_frames is None:
        return small
    return replace(small, tile_frames=TILE_FRAMES, tile_frames_overlap=TILE_FRAMES_OVERLAP)


def _shrink_sampler(config: Config) -> SamplerConfig | FlowSamplerConfig:
    sampler = config.sampler
    if isinstance(sampler, FlowSamplerConfig):
        # Wan's shift leaves the second expert the last of four steps.
        return replace(sampler, steps=STEPS if config.model.boundary is None else 2 * STEPS)
    fixed = sampler.sigmas is not None or sampler.schedule == "distilled"
    return replace(
        sampler,
        steps=sampler.steps if fixed else STEPS,
        video=_shrink_guidance(sampler.video),
        audio=_shrink_guidance(sampler.audio),
    )


def _shrink_guidance(guidance: GuidanceConfig) -> GuidanceConfig:
    return replace(guidance, stg_blocks=(LAYERS - 1,) if guidance.stg_blocks else ())


def _shrink_request(request: Request, config: Config, plan: ParallelPlan, *, latent: int, time: int) -> Request:
    """``latent``: pixels of a latent along a side; ``time``: frames of one."""
    split = config.parallel.vae_split
    longer = "height" if request.height > request.width else "width"

    def side(name: str) -> int:
        cut = name == (longer if split == "auto" else split)
        lines = max(LINES, plan.vae_size) if cut else LINES
        # Even numbers of latents, as Wan's tokens need them.
        return min(getattr(request, name), (lines + lines % 2) * latent)

    frames = min(request.num_frames, 2 * time + 1)
    images = tuple(replace(image, frame=min(image.frame, frames - 1)) for image in request.images)
    return replace(
        request,
        prompt=request.prompt[:PROMPT],
        negative_prompt=request.negative_prompt[:PROMPT],
        height=side("height"),
        width=side("width"),
        num_frames=frames,
        images=images,
    )
