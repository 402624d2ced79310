"""What a file is, from names that its family has in public: right files pass, each wrong one is told by its own."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.tiny_ltx2 import Version, build_upsampler, official_tensors, tiny_checkpoints
from vgen.checkpoint_kinds import (
    SIGNATURES,
    incomplete,
    kind_of_file,
    kind_of_folder,
    quantization,
    recognise,
)

DIT = "model.diffusion_model."


@pytest.mark.parametrize("version", ["2.0", "2.3"])
def test_an_ltx2_model_is_nothing_else_and_complete(version: Version) -> None:
    tensors = official_tensors(tiny_checkpoints(version).parts)
    assert recognise(tensors, {"model_version": "2.3.0"}) is None
    assert recognise(tensors, {}) is None
    assert incomplete(tensors) is None
    assert quantization(dict.fromkeys(tensors, "BF16")) is None


LTX_VIDEO = [
    f"{DIT}adaln_single.linear.weight",
    f"{DIT}caption_projection.linear_1.weight",
    f"{DIT}patchify_proj.weight",
    f"{DIT}transformer_blocks.0.attn1.to_q.weight",
    "vae.decoder.conv_in.conv.weight",
    "vae.per_channel_statistics.mean-of-means",
]
WAN = [
    "blocks.0.cross_attn.k.weight",
    "blocks.0.modulation",
    "blocks.0.self_attn.norm_q.weight",
    "head.modulation",
    "patch_embedding.weight",
    "text_embedding.0.weight",
]
WAN_VAE = [
    "conv1.weight",
    "decoder.middle.0.residual.0.gamma",
    "decoder.upsamples.0.residual.2.weight",
    "encoder.downsamples.0.residual.0.gamma",
]
GEMMA = ["language_model.model.layers.0.self_attn.q_proj.weight", "vision_tower.vision_model.embeddings.weight"]


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (["diffusion_model.transformer_blocks.0.attn1.to_q.lora_A.weight"], "a LoRA"),
        (["lora_unet_blocks_0.lora_up.weight"], "a LoRA"),
        (
            ["lycoris_transformer_blocks_0_attn1_to_q.alpha", "lycoris_transformer_blocks_0_attn1_to_q.lokr_w1"],
            "a LoRA",
        ),
        (["diffusion_model.transformer_blocks.0.attn1.to_q.lokr_w2_a"], "a LoRA"),
        (["lora_unet_blocks_0_self_attn_q.hada_w1_b"], "a LoRA"),
        (["lora_unet_blocks_0_self_attn_q.oft_blocks"], "a LoRA"),
        (list(build_upsampler().state_dict()), "a latent upsampler"),
        (list(build_upsampler(rational=False).state_dict()), "a latent upsampler"),
        (list(build_upsampler(spatial=False, temporal=True).state_dict()), "a latent upsampler"),
        (LTX_VIDEO, "a model of LTX-Video 0.9, which has no sound"),
        ([name.removeprefix(DIT) for name in LTX_VIDEO], "a model of LTX-Video 0.9, which has no sound"),
        (WAN, "a Wan transformer"),
        ([DIT + name for name in WAN], "a Wan transformer"),
        (WAN_VAE, "a Wan VAE"),
        (GEMMA, "a Gemma text encoder"),
        (["model." + GEMMA[0].replace(".model.", ".")], "a Gemma text encoder"),
        (["model.layers.0.self_attn.q_proj.weight", "model.layers.0.pre_feedforward_layernorm.weight"], "a Gemma text"),
        (["model.layers.0.self_attn.q_proj.weight", "model.norm.weight"], "a language model"),
        (["proj_in.weight", "transformer_blocks.0.audio_attn1.to_q.weight"], "a diffusers transformer of LTX-2"),
        (["x_embedder.weight", "transformer_blocks.0.attn.to_q.weight"], "a diffusers transformer of another model"),
        (["decoder.up_blocks.0.conv.weight", "per_channel_statistics.mean-of-means"], "a video VAE of LTX alone"),
        (["decoder.up.0.block.0.weight", "per_channel_statistics.mean-of-means"], "an audio VAE of LTX-2 alone"),
        ([f"{DIT}keyframes_abs_pos_embedding", f"{DIT}audio_patchify_proj.weight"], "of LTX-2.5, which"),
    ],
)
def test_wrong_files_are_recognised(names: Sequence[str], what: str) -> None:
    found = recognise(names, {})
    assert found is not None
    assert found[0].startswith(what)


@pytest.mark.parametrize("version", ["2.0", "2.3"])
@pytest.mark.parametrize(
    ("part", "what"),
    [
        ("transformer", "a diffusers transformer of LTX-2"),
        ("connectors", "the text connectors of LTX-2 alone"),
        ("vae", "a diffusers video VAE of LTX alone"),
        ("audio_vae", "a diffusers audio VAE of LTX-2 alone"),
        ("vocoder", "a diffusers vocoder of LTX-2 alone"),
    ],
)
def test_a_file_out_of_an_ltx2_folder_is_named_with_its_folder(version: Version, part: str, what: str) -> None:
    found = recognise(getattr(tiny_checkpoints(version).parts, part).state_dict(), {})
    assert found == (what, "give its parent folder, with transformer, connectors, vae, audio_vae and vocoder")


@pytest.mark.parametrize(
    ("name", "sizes", "what"),
    [
        ("WanTransformer3DModel", {"num_layers": 1}, "a diffusers transformer of Wan"),
        ("WanTransformer3DModel", {"num_layers": 1, "image_dim": 8}, "a diffusers transformer of Wan"),
        ("AutoencoderKLWan", {"base_dim": 8}, "a diffusers VAE of Wan or Qwen-Image"),
        ("AutoencoderKLWan", {"base_dim": 8, "is_residual": True}, "a diffusers VAE of Wan or Qwen-Image"),
        ("AutoencoderKLQwenImage", {"base_dim": 8}, "a diffusers VAE of Wan or Qwen-Image"),
        ("AutoencoderKLLTXVideo", {}, "a diffusers video VAE of LTX alone"),
        ("LTXVideoTransformer3DModel", {"num_layers": 1}, "a diffusers transformer of another model"),
        ("AutoencoderKLCogVideoX", {}, None),
        ("AutoencoderKLHunyuanVideo", {}, None),
        ("AutoencoderKLMochi", {}, None),
        ("AutoencoderKL", {}, None),
    ],
)
def test_diffusers_files_of_other_models_are_recognised(name: str, sizes: dict[str, Any], what: str | None) -> None:
    import diffusers

    with torch.device("meta"):
        names = list(getattr(diffusers, name)(**sizes).state_dict())
    found = recognise(names, {})
    assert (found and found[0]) == what


def test_every_signature_has_a_file_in_these_tests_and_a_fix() -> None:
    assert len({signature.what for signature in SIGNATURES}) == len(SIGNATURES) == 18
    assert all(signature.fix for signature in SIGNATURES)


@pytest.mark.parametrize("names", [["a"], ["double_blocks.0.img_attn_qkv.weight", "txt_in.individual_token_refiner"]])
def test_what_is_not_known_stays_so(names: Sequence[str]) -> None:
    assert recognise(names, {}) is None
    assert incomplete(names) is None


def test_versions_after_2_3_are_told_by_their_metadata() -> None:
    names = [f"{DIT}audio_patchify_proj.weight"]
    found = recognise(names, {"model_version": "2.5.0"})
    assert found is not None
    assert found[0] == "of LTX-2.5.0, which this version does not run"
    for version in ("2.3.0", "2.0", "unknown"):
        assert recognise(names, {"model_version": version}) is None


def test_parts_of_an_ltx2_file_are_named() -> None:
    names = list(official_tensors(tiny_checkpoints("2.3").parts))
    for start, says in (
        ("vae.", "only the video VAE of LTX-2, without its transformer, text projection, audio VAE, vocoder"),
        ("audio_vae.", "only the audio VAE of LTX-2, without its transformer, text projection, video VAE, vocoder"),
        ("vocoder.", "only the vocoder of LTX-2"),
        (DIT, "only the transformer of LTX-2, without its text projection, video VAE, audio VAE, vocoder"),
    ):
        found = incomplete([name for name in names if name.startswith(start)])
        assert found is not None
        assert found[0].startswith(says)
    found = incomplete([name for name in names if not name.startswith("vocoder.")])
    assert found is not None
    assert found[0] == (
        "only the transformer and the text projection and the video VAE and the audio VAE of LTX-2, without its vocoder"
    )


@pytest.mark.parametrize(
    ("dtypes", "says"),
    [
        (
            {"p.weight": "F8_E4M3", "p.weight_scale": "F32", "p.input_scale": "F32", "q.weight": "BF16"},
            "quantized to fp8 (1 weights, 'p.weight' is F8_E4M3)",
        ),
        ({"p.weight": "F8_E4M3", "p.bias": "BF16"}, "cast to fp8 without scales (1 weights, 'p.weight' is F8_E4M3)"),
        (
            {"p.weight_scale": "F8_E4M3", "p.weight": "U8", "p.weight_scale_2": "F32", "p.input_scale": "F32"},
            "quantized to NVFP4 (1 weights, 'p.weight' is U8)",
        ),
        ({"p.weight": "I8", "p.scale": "F32"}, "quantized (1 weights, 'p.weight' is I8)"),
        ({"blob": "U8"}, "quantized (1 weights, 'blob' is U8)"),
    ],
)
def test_quantizations_are_named(dtypes: dict[str, str], says: str) -> None:
    assert quantization(dtypes) == says


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("ltx-2-19b-dev.safetensors", "dev"),
        ("ltx-2-19b-distilled.safetensors", "distilled"),
        ("ltx-2.3-22b-distilled-1.1.safetensors", "distilled"),
        ("LTX_2.3_22B_Distilled_bf16.safetensors", "distilled"),
        ("model.safetensors", None),
        ("developed.safetensors", None),
    ],
)
def test_released_names_tell_dev_from_distilled(file: str, kind: str | None) -> None:
    assert kind_of_file(file, {"transformer": {}}) == kind


def test_listed_steps_outrank_a_files_name() -> None:
    steps = [1.0, 0.9937, 0.725]
    assert kind_of_file("ltx-2-19b-dev.safetensors", {"allowed_inference_steps": steps}) == "distilled"
    assert kind_of_file("ltx-2-19b-dev.safetensors", {"allowed_inference_steps": None}) == "dev"


@pytest.mark.parametrize(
    ("name", "dynamic", "kind"),
    [
        ("LTX-2", True, "dev"),
        ("LTX-2.3-Distilled-Diffusers", False, "distilled"),
        ("renamed", False, "distilled"),
        # Distilled weights were published beside the dev model's scheduler as well.
        ("LTX-2-19b-distilled", True, "distilled"),
        ("LTX-2-19b-distilled", None, "distilled"),
        ("LTX-2", None, None),
    ],
)
def test_a_folder_tells_by_its_scheduler_and_name(name: str, dynamic: bool | None, kind: str | None) -> None:
    assert kind_of_folder(name, {} if dynamic is None else {"use_dynamic_shifting": dynamic}) == kind
