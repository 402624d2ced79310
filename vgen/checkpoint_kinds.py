"""Says what a safetensors file is, from the names, dtypes and metadata in its header alone; needs no torch.

Wrong files are recognised by tensor names that only their family has, so a renamed file is recognised as well.

Dev or distilled is another matter: the two have the same names, shapes and ``config`` sections (the scheduler's too:
``RectifiedFlowScheduler`` without steps), and no public source shows a key of LTX-2's metadata that tells them apart.

* Certain: ``allowed_inference_steps`` in the config, which distilled LTX-Video files have, means distilled. In a
  diffusers folder, a scheduler without dynamic shifting means distilled:
  ``diffusers/LTX-2.3-Distilled-Diffusers`` at 432e0d3 has ``use_dynamic_shifting: false`` where
  ``scripts/convert_ltx2_to_diffusers.py`` writes ``true`` for the dev model.
* By convention: ``distilled`` or ``dev`` as a word of the file's or repository's name, as in all released ones. The
  name outranks a dynamic scheduler, since distilled weights were also published beside the dev model's scheduler.
* Else unknown.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["dev", "distilled"]

FULL_MODEL = "use a file with the full model (ltx-2-19b-dev.safetensors)"
RUNS = "use a file of LTX-2 2.0 or 2.3 (ltx-2-19b-dev.safetensors)"
FULL_FOLDER = "give its parent folder, with transformer, connectors, vae, audio_vae and vocoder"


@dataclass(frozen=True)
class Signature:
    """A file is ``what`` if each pattern of ``has`` is found in some name and no pattern of ``lacks`` in any."""

    what: str
    fix: str
    has: tuple[str, ...]
    lacks: tuple[str, ...] = ()

    def fits(self, names: Collection[str]) -> bool:
        def found(pattern: str) -> bool:
            return any(re.search(pattern, name) for name in names)

        return all(map(found, self.has)) and not any(map(found, self.lacks))


SIGNATURES = (
    Signature(
        "a LoRA",
        "use the checkpoint that it was made for",
        # The second and third are LyCORIS: low-rank Kronecker and Hadamard products, orthogonal factors.
        (r"\.lora_(A|B|up|down)\.|\.(lokr|hada)_(w|t)[12](_a|_b)?$|\.oft_(blocks|diag)$",),
    ),
    Signature("of LTX-2.5, which this version does not run", RUNS, (r"(^|\.)keyframes_abs_pos_embedding$",)),
    Signature("a latent upsampler", FULL_MODEL, (r"^initial_conv\.", r"^post_upsample_res_blocks\.")),
    Signature("a model of LTX-Video 0.9, which has no sound", RUNS, (r"(^|\.)patchify_proj\.weight$",), (r"audio",)),
    Signature("a Wan transformer", RUNS, (r"(^|\.)patch_embedding\.weight$", r"(^|\.)blocks\.0\.self_attn\.")),
    Signature("a diffusers transformer of Wan", RUNS, (r"^condition_embedder\.", r"^blocks\.0\.attn1\.")),
    Signature("a Wan VAE", FULL_MODEL, (r"^decoder\.upsamples\.0\.", r"^decoder\.middle\.0\.residual\.")),
    Signature(
        "a diffusers VAE of Wan or Qwen-Image",  # all names of the two are the same
        FULL_MODEL,
        (r"^decoder\.up_blocks\.0\.resnets\.0\.norm1\.gamma$", r"^quant_conv\."),
    ),
    Signature(
        "a Gemma text encoder",
        "it belongs into the text encoder's setting: " + FULL_MODEL,
        (r"^(model\.)?language_model\.|(^|\.)layers\.\d+\.pre_feedforward_layernorm\.",),
    ),
    Signature("a language model", FULL_MODEL, (r"^(model\.)?layers\.\d+\.self_attn\.",)),
    Signature("a diffusers transformer of LTX-2", FULL_FOLDER, (r"^transformer_blocks\.\d+\.audio_attn1\.",)),
    Signature("the text connectors of LTX-2 alone", FULL_FOLDER, (r"^video_connector\.", r"^(video_)?text_proj_in\.")),
    Signature(
        "a diffusers video VAE of LTX alone",
        FULL_FOLDER,
        (r"^latents_mean$", r"^decoder\.up_blocks\.0\.", r"^decoder\.mid_block\.resnets\.0\.conv1\.conv\."),
    ),
    Signature(
        "a diffusers audio VAE of LTX-2 alone",
        FULL_FOLDER,
        (r"^latents_mean$", r"^decoder\.up\.0\.", r"^decoder\.mid\.block_1\.conv1\.conv\."),
    ),
    Signature(
        "a diffusers vocoder of LTX-2 alone",
        FULL_FOLDER,
        (r"^(vocoder\.)?upsamplers\.0\.", r"^(vocoder\.)?resnets\.0\.convs1\."),
    ),
    Signature("a diffusers transformer of another model", RUNS, (r"^transformer_blocks\.\d+\.",)),
    Signature("a video VAE of LTX alone", FULL_MODEL, (r"^per_channel_statistics\.", r"^decoder\.up_blocks\.")),
    Signature("an audio VAE of LTX-2 alone", FULL_MODEL, (r"^per_channel_statistics\.", r"^decoder\.up\.")),
)
"""First fit wins."""

TRANSFORMER_PREFIX = "model.diffusion_model."
PARTS = {
    TRANSFORMER_PREFIX: "transformer",
    "text_embedding_projection.": "text projection",
    "vae.": "video VAE",
    "audio_vae.": "audio VAE",
    "vocoder.": "vocoder",
}
"""Starts of names in an official file, and the parts of LTX-2 that they are."""

DIFFUSERS_TRANSFORMERS = {
    "LTX2VideoTransformer3DModel": "LTX-2",
    "LTXVideoTransformer3DModel": "LTX-Video 0.9, which has no sound",
    "WanTransformer3DModel": "Wan",
}
"""Models by the class of their transformer in a diffusers folder."""

_FP8 = ("F8_E4M3", "F8_E5M2")


def recognise(names: Collection[str], metadata: Mapping[str, str]) -> tuple[str, str] | None:
    """What a file is that is no LTX-2 model, and the fix; None for an LTX-2 model and for what is not known."""
    if _model_version(metadata) >= (2, 5):
        return f"of LTX-{metadata['model_version']}, which this version does not run", RUNS
    found = next((signature for signature in SIGNATURES if signature.fits(names)), None)
    return (found.what, found.fix) if found else None


def name_of(names: Collection[str], metadata: Mapping[str, str]) -> str | None:
    """What a file is, an LTX-2 model included; None for what is not known."""
    found = recognise(names, metadata)
    if found is not None:
        return found[0]
    return "an LTX-2 model" if any(name.startswith(TRANSFORMER_PREFIX) for name in names) else None


def incomplete(names: Collection[str]) -> tuple[str, str] | None:
    """What an official file holds that has some parts of LTX-2 only, and the fix; None with all parts or no part."""
    held = {start: any(name.startswith(start) for name in names) for start in PARTS}
    present = [part for start, part in PARTS.items() if held[start]]
    if not present or len(present) == len(PARTS):
        return None
    missing = [part for start, part in PARTS.items() if not held[start]]
    return f"only the {' and the '.join(present)} of LTX-2, without its {', '.join(missing)}", FULL_MODEL


def quantization(dtypes: Mapping[str, str]) -> str | None:
    """The name of a file's quantization and how much of it is quantized, or None; ``dtypes`` is name to dtype."""
    quantized = {name: dtype for name, dtype in dtypes.items() if dtype.startswith(("U8", "I8", "F8", "F4"))}
    if not quantized:
        return None
    weights = [name for name in quantized if name.endswith(".weight")] or list(quantized)
    return f"{_quantization(weights[0], dtypes)} ({len(weights)} weights, '{weights[0]}' is {dtypes[weights[0]]})"


def _quantization(name: str, dtypes: Mapping[str, str]) -> str:
    if dtypes[name] in ("U8", "F4") and f"{name}_scale_2" in dtypes:
        return "quantized to NVFP4"
    if dtypes[name] in _FP8:
        return "quantized to fp8" if f"{name}_scale" in dtypes else "cast to fp8 without scales"
    return "quantized"


def kind_of_file(file_name: str, config: Mapping[str, Any]) -> Kind | None:
    """Dev or distilled, of an official file; see the module's docstring for what is certain."""
    if config.get("allowed_inference_steps"):
        return "distilled"
    return _kind_of_name(file_name)


def kind_of_folder(name: str, scheduler: Mapping[str, Any]) -> Kind | None:
    """Dev or distilled, of a diffusers folder, by its (repository's) name and its ``scheduler_config.json``."""
    dynamic = scheduler.get("use_dynamic_shifting")
    if dynamic is False:
        return "distilled"
    return _kind_of_name(name) or ("dev" if dynamic else None)


def _kind_of_name(name: str) -> Kind | None:
    words = re.split(r"[^a-z0-9]+", name.lower())
    if "distilled" in words:
        return "distilled"
    return "dev" if "dev" in words else None


def _model_version(metadata: Mapping[str, str]) -> tuple[int, ...]:
    match = re.match(r"(\d+)\.(\d+)", metadata.get("model_version", ""))
    return (int(match[1]), int(match[2])) if match else ()
