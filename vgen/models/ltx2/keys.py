"""Checkpoint names of LTX-2: where each component lies in a file and how diffusers renames it, as data; needs no torch.

Our modules use the official names, so an official file needs prefixes only. A diffusers folder needs whole path
segments renamed: matching segments rather than substrings (``adaln_single`` is part of other names, ``ups`` of
``upsamplers``) makes the tables independent of their order.

Source: Lightricks/LTX-2 at 400fd31 (``*/model_configurator.py``), huggingface/diffusers 0.42.1
(``loaders/single_file_utils.py``, ``scripts/convert_ltx2_to_diffusers.py``).
"""

from collections.abc import Mapping

from vgen.models.names import Layout

COMPONENTS = (
    "transformer",
    "video_connector",
    "audio_connector",
    "text_projection",
    "video_encoder",
    "video_decoder",
    "audio_encoder",
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
"""Buffers of all encoders and decoders: what a normalized latent is shifted by and multiplied with."""


_DIT = "model.diffusion_model."

OFFICIAL: Mapping[str, Layout] = {
    "transformer": Layout({_DIT: ""}),
    "video_connector": Layout({f"{_DIT}video_embeddings_connector.": ""}),
    "audio_connector": Layout({f"{_DIT}audio_embeddings_connector.": ""}),
    "text_projection": Layout({"text_embedding_projection.": ""}),
    **{
        f"{modality}_{half}": Layout({f"{vae}.{half}.": "", **{f"{vae}.{name}": name for name in STATISTICS}})
        for modality, vae in (("video", "vae"), ("audio", "audio_vae"))
        for half in ("encoder", "decoder")
    },
    # Stripped once: 2.3 has a second "vocoder." inside, beside "bwe_generator." and "mel_stft.".
    "vocoder": Layout({"vocoder.": ""}),
}

OFFICIAL_IGNORED = (
    "vae.per_channel_statistics.channel",
    "vae.per_channel_statistics.mean-of-stds",  # also mean-of-stds_over_std-of-means
)
"""Starts of names that a 2.0 file holds and nothing here reads: two of the statistics suffice."""

DIFFUSERS_FOLDERS: Mapping[str, str] = {
    "transformer": "transformer",
    "video_connector": "connectors",
    "audio_connector": "connectors",
    "text_projection": "connectors",
    "video_encoder": "vae",
    "video_decoder": "vae",
    "audio_encoder": "audio_vae",
    "audio_decoder": "audio_vae",
    "vocoder": "vocoder",
}

_QK_NORMS = {"norm_q": "q_norm", "norm_k": "k_norm"}
_LATENT_STATISTICS = {"latents_mean": STATISTICS[0], "latents_std": STATISTICS[1]}
_MAX_LEVELS = 4
"""Of the encoder, always; of the decoder, in 2.3."""

DIFFUSERS: Mapping[str, Layout] = {
    "transformer": Layout(
        {"": ""},
        {
            "proj_in": "patchify_proj",
            "audio_proj_in": "audio_patchify_proj",
            "time_embed": "adaln_single",
            "audio_time_embed": "audio_adaln_single",
            "prompt_adaln": "prompt_adaln_single",
            "audio_prompt_adaln": "audio_prompt_adaln_single",
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
    "text_projection": Layout(
        {
            "text_proj_in.": "aggregate_embed.",
            "video_text_proj_in.": "video_aggregate_embed.",
            "audio_text_proj_in.": "audio_aggregate_embed.",
        }
    ),
    "video_encoder": Layout(
        {"encoder.": "", **_LATENT_STATISTICS},
        {
            **{f"down_blocks.{level}": f"down_blocks.{2 * level}" for level in range(_MAX_LEVELS)},
            **{f"down_blocks.{level}.downsamplers.0": f"down_blocks.{2 * level + 1}" for level in range(_MAX_LEVELS)},
            "mid_block": f"down_blocks.{2 * _MAX_LEVELS}",
            "resnets": "res_blocks",
        },
    ),
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
    "audio_encoder": Layout({"encoder.": "", **_LATENT_STATISTICS}),
    "audio_decoder": Layout({"decoder.": "", **_LATENT_STATISTICS}),
    "vocoder": Layout(
        {"": ""},
        {
            "conv_in": "conv_pre",
            "conv_out": "conv_post",
            "act_out": "act_post",
            "upsamplers": "ups",
            "resnets": "resblocks",
            "downsample": "downsample.lowpass",
        },
    ),
}
