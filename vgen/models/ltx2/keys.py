"""Checkpoint names of LTX-2: where each component lies in a file and how diffusers renames it, as data; needs no torch.

Our modules use the official names, so an official file needs prefixes only. A diffusers folder needs whole path
segments renamed: matching segments rather than substrings (``adaln_single`` is part of four other names, ``ups`` of
``upsamplers``) makes the tables independent of their order.

Source: Lightricks/LTX-2 at 400fd31 (``*/model_configurator.py``), huggingface/diffusers 0.42.1
(``loaders/single_file_utils.py``, ``scripts/convert_ltx2_to_diffusers.py``).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

COMPONENTS = (
    "transformer",
    "video_connector",
    "audio_connector",
    "text_projection",
    "video_decoder",
    "audio_decoder",
    "vocoder",
)

CONNECTORS: Mapping[str, str] = {
    "text_embedding_projection": "text_projection",
    "video_embeddings_connector": "video_connector",
    "audio_embeddings_connector": "audio_connector",
}
"""Child modules of ``TextConnectors`` and the components that they are."""

STATISTICS = ("per_channel_statistics.mean-of-means", "per_channel_statistics.std-of-means")
"""Buffers of both decoders: what a normalized latent is multiplied by and shifted with."""


@dataclass(frozen=True)
class Layout:
    """Where one component's tensors are, and what they are called there.

    ``prefixes`` maps the start of a name in the file (or a whole name) to its start in our module; the longest match
    over all components of a file owns the tensor. ``segments`` maps one or several whole path segments to ours.
    """

    prefixes: Mapping[str, str]
    segments: Mapping[str, str] = field(default_factory=dict)


_DIT = "model.diffusion_model."

OFFICIAL: Mapping[str, Layout] = {
    "transformer": Layout({_DIT: ""}),
    "video_connector": Layout({f"{_DIT}video_embeddings_connector.": ""}),
    "audio_connector": Layout({f"{_DIT}audio_embeddings_connector.": ""}),
    "text_projection": Layout({"text_embedding_projection.": ""}),
    "video_decoder": Layout({"vae.decoder.": "", **{f"vae.{name}": name for name in STATISTICS}}),
    "audio_decoder": Layout({"audio_vae.decoder.": "", **{f"audio_vae.{name}": name for name in STATISTICS}}),
    "vocoder": Layout({"vocoder.": ""}),
}

OFFICIAL_IGNORED = (
    "vae.encoder.",  # image-to-video only
    "audio_vae.encoder.",  # audio-to-video only
    "vae.per_channel_statistics.channel",
    "vae.per_channel_statistics.mean-of-stds",  # also mean-of-stds_over_std-of-means
)
"""Starts of names that an official file holds and nothing here reads; both decoders read two statistics only."""

DIFFUSERS_FOLDERS: Mapping[str, str] = {
    "transformer": "transformer",
    "video_connector": "connectors",
    "audio_connector": "connectors",
    "text_projection": "connectors",
    "video_decoder": "vae",
    "audio_decoder": "audio_vae",
    "vocoder": "vocoder",
}

_QK_NORMS = {"norm_q": "q_norm", "norm_k": "k_norm"}
_LATENT_STATISTICS = {"latents_mean": STATISTICS[0], "latents_std": STATISTICS[1]}
_MAX_LEVELS = 4

DIFFUSERS: Mapping[str, Layout] = {
    "transformer": Layout(
        {"": ""},
        {
            "proj_in": "patchify_proj",
            "audio_proj_in": "audio_patchify_proj",
            "time_embed": "adaln_single",
            "audio_time_embed": "audio_adaln_single",
            "av_cross_attn_video_scale_shift": "av_ca_video_scale_shift_adaln_single",
            "av_cross_attn_audio_scale_shift": "av_ca_audio_scale_shift_adaln_single",
            "av_cross_attn_video_a2v_gate": "av_ca_a2v_gate_adaln_single",
            "av_cross_attn_audio_v2a_gate": "av_ca_v2a_gate_adaln_single",
            "video_a2v_cross_attn_scale_shift_table": "scale_shift_table_a2v_ca_video",
            "audio_a2v_cross_attn_scale_shift_table": "scale_shift_table_a2v_ca_audio",
            **_QK_NORMS,
        },
    ),
    "video_connector": Layout({"video_connector.": ""}, {"transformer_blocks": "transformer_1d_blocks", **_QK_NORMS}),
    "audio_connector": Layout({"audio_connector.": ""}, {"transformer_blocks": "transformer_1d_blocks", **_QK_NORMS}),
    "text_projection": Layout({"text_proj_in.": "aggregate_embed."}),
    "video_decoder": Layout(
        {"decoder.": "", **_LATENT_STATISTICS},
        {
            # Diffusers groups what the official list runs one after another: middle, then per level up and residual.
            "mid_block": "up_blocks.0",
            **{f"up_blocks.{level}.upsamplers.0": f"up_blocks.{2 * level + 1}" for level in range(_MAX_LEVELS)},
            **{f"up_blocks.{level}": f"up_blocks.{2 * level + 2}" for level in range(_MAX_LEVELS)},
            "resnets": "res_blocks",
        },
    ),
    "audio_decoder": Layout({"decoder.": "", **_LATENT_STATISTICS}),
    "vocoder": Layout(
        {"": ""}, {"conv_in": "conv_pre", "conv_out": "conv_post", "upsamplers": "ups", "resnets": "resblocks"}
    ),
}

DIFFUSERS_IGNORED: Mapping[str, tuple[str, ...]] = {"vae": ("encoder.",), "audio_vae": ("encoder.",)}
"""Folder to the starts of names in it that nothing here reads."""


def owner(name: str, layouts: Mapping[str, Layout]) -> tuple[str, str] | None:
    """The component that owns ``name`` and the longest of its prefixes that matches; None if no component does."""
    matches = [
        (len(prefix), component, prefix)
        for component, layout in layouts.items()
        for prefix in layout.prefixes
        if name.startswith(prefix)
    ]
    return max(matches)[1:] if matches else None


def rename(name: str, layout: Layout, prefix: str) -> str:
    """Our module's name for the tensor ``name`` that starts with ``prefix`` of ``layout``."""
    rest = name[len(prefix) :]
    if layout.segments:
        # Longest first, so that "up_blocks.0.upsamplers.0" is not taken for "up_blocks.0"; one pass, so that a
        # replacement is never replaced again.
        choices = "|".join(re.escape(key) for key in sorted(layout.segments, key=len, reverse=True))
        rest = re.sub(rf"(?<![^.])(?:{choices})(?![^.])", lambda match: layout.segments[match.group()], rest)
    return layout.prefixes[prefix] + rest
