"""Sizes of the Wan transformer and VAE as frozen records, read from the checkpoints' configs; needs no torch.

A diffusers folder describes the transformer and the VAE. The original layout describes the transformer only, and not
all of it: ``transformer_config_original`` takes the rest from the shapes of its tensors. Its VAEs are tensors without a
config: the constants ``VAE_2_1`` and ``VAE_2_2`` are theirs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from vgen.models.errors import ConfigError

TEXT_TOKENS = 512
"""Length of every text: the prompt's tokens, then zeros, which are attended to like any other."""

Residual = Literal["fp32", "model"]
"""Whose numbers the transformer gives: the official code's, whose tokens stay in fp32 from block to block, or those of
diffusers, which rounds them to the model's dtype after every step of a block."""


@dataclass(frozen=True)
class WanTransformerConfig:
    """One transformer; A14B has two of the same sizes.

    ``image_dim``: width of the CLIP tokens of 2.1's image-to-video. ``pos_embed_seq_len``: tokens of its two images
    where it takes a first and a last one, which then have positions of their own. ``rope_max_seq_len``: most patches
    along any axis.
    """

    num_attention_heads: int
    attention_head_dim: int
    in_channels: int
    out_channels: int
    text_dim: int
    freq_dim: int
    ffn_dim: int
    num_layers: int
    eps: float = 1e-6
    patch_size: tuple[int, int, int] = (1, 2, 2)
    cross_attn_norm: bool = True
    qk_norm: Literal["rms_norm_across_heads"] = "rms_norm_across_heads"
    image_dim: int | None = None
    added_kv_proj_dim: int | None = None
    pos_embed_seq_len: int | None = None
    rope_max_seq_len: int = 1024

    @property
    def width(self) -> int:
        return self.num_attention_heads * self.attention_head_dim


@dataclass(frozen=True)
class WanVaeConfig:
    """``is_residual``: the parameter-free shortcut around each level of 2.2's. ``patch_size``: its pixel patches.

    ``decoder_base_dim``: None where the decoder is as wide as the encoder. ``temporal_downsample``: whether a level
    halves the frames, in the encoder's order. ``latents_mean`` and ``latents_std``: one value per latent channel.
    ``scale_factor_*``: pixels per latent (frames: after the first one).
    """

    base_dim: int
    z_dim: int
    latents_mean: tuple[float, ...]
    latents_std: tuple[float, ...]
    decoder_base_dim: int | None = None
    dim_mult: tuple[int, ...] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    temporal_downsample: tuple[bool, ...] = (False, True, True)
    in_channels: int = 3
    out_channels: int = 3
    patch_size: int | None = None
    is_residual: bool = False
    scale_factor_temporal: int = 4
    scale_factor_spatial: int = 8


VAE_2_1 = WanVaeConfig(
    base_dim=96,
    z_dim=16,
    latents_mean=(
        -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
        0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
    ),
    latents_std=(
        2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
        3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160,
    ),
)  # fmt: skip
"""The VAE of 2.1 and of 2.2 A14B."""

VAE_2_2 = WanVaeConfig(
    base_dim=160,
    decoder_base_dim=256,
    z_dim=48,
    latents_mean=(
        -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557,
        -0.1382, 0.0542, 0.2813, 0.0891, 0.1570, -0.0098, 0.0375, -0.1825,
        -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502,
        -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230,
        -0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.0520, 0.3748,
        0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
    ),
    latents_std=(
        0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013,
        0.8158, 1.0344, 0.5894, 1.0901, 0.6885, 0.6165, 0.8454, 0.4978,
        0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
        0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093,
        0.5709, 0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887,
        0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
    ),
    in_channels=12,
    out_channels=12,
    patch_size=2,
    is_residual=True,
    scale_factor_spatial=16,
)  # fmt: skip
"""The VAE of 2.2 TI2V-5B."""


@dataclass(frozen=True)
class WanArchitecture:
    """A whole model. ``num_transformers``: 2 where experts of the same sizes share the steps, as in A14B.

    ``image_encoder``: what the CLIP vision model of 2.1's image-to-video has other than ViT-H/14, in the words of
    transformers.
    """

    transformer: WanTransformerConfig
    vae: WanVaeConfig
    num_transformers: int = 1
    image_encoder: Mapping[str, Any] = field(default_factory=dict)

    @property
    def version(self) -> Literal["2.1", "2.2"]:
        return "2.2" if self.num_transformers > 1 or self.vae.is_residual else "2.1"

    @property
    def kind(self) -> Literal["t2v", "i2v", "ti2v"]:
        """What it makes a video of: a text, an image in channels of its own, or a text and perhaps a first frame."""
        if self.transformer.in_channels > self.vae.z_dim:
            return "i2v"
        return "ti2v" if self.vae.is_residual else "t2v"


VAES: Mapping[str, WanVaeConfig] = {"2.1": VAE_2_1, "2.2": VAE_2_2}


def architecture(config: Mapping[str, Any]) -> WanArchitecture:
    """Read ``model.architecture``: ``transformer`` in the words of its ``config.json``, ``vae`` likewise or the version
    of a released one, ``num_transformers`` and ``image_encoder``. Latents without statistics are normal as they are.

    Raises:
        ConfigError: a required value is missing, or a value describes another architecture.
    """
    vae = _require(config, "model.architecture", "vae")
    if isinstance(vae, str) and vae not in VAES:
        raise ConfigError(f"model.architecture.vae={vae} is no released VAE; use {' or '.join(VAES)}, or its sizes")
    return WanArchitecture(
        transformer_config(_require(config, "model.architecture", "transformer")),
        VAES[vae] if isinstance(vae, str) else vae_config({**_normal(vae), **vae}),
        config.get("num_transformers", 1),
        config.get("image_encoder") or {},
    )


def _normal(vae: Mapping[str, Any]) -> dict[str, Any]:
    channels = vae.get("z_dim", 0)
    return {"latents_mean": (0.0,) * channels, "latents_std": (1.0,) * channels}


def transformer_config(config: Mapping[str, Any]) -> WanTransformerConfig:
    """Read the ``transformer/config.json`` of a diffusers folder; keys that describe no size are ignored.

    Raises:
        ConfigError: a required value is missing, or a value describes another architecture.
    """
    where = "transformer/config.json"
    _check(config, where, "_class_name", "WanTransformer3DModel")
    _check(config, where, "qk_norm", "rms_norm_across_heads")
    _check(config, where, "window_size", [-1, -1])
    _check(config, where, "patch_size", [1, 2, 2])
    in_channels = _require(config, where, "in_channels")
    return _checked_transformer(
        WanTransformerConfig(
            num_attention_heads=_require(config, where, "num_attention_heads"),
            attention_head_dim=_require(config, where, "attention_head_dim"),
            in_channels=in_channels,
            out_channels=config.get("out_channels") or in_channels,
            text_dim=_require(config, where, "text_dim"),
            freq_dim=_require(config, where, "freq_dim"),
            ffn_dim=_require(config, where, "ffn_dim"),
            num_layers=_require(config, where, "num_layers"),
            eps=_require(config, where, "eps"),
            cross_attn_norm=_require(config, where, "cross_attn_norm"),
            image_dim=config.get("image_dim"),
            added_kv_proj_dim=config.get("added_kv_proj_dim"),
            pos_embed_seq_len=config.get("pos_embed_seq_len"),
            rope_max_seq_len=config.get("rope_max_seq_len", 1024),
        ),
        where,
    )


_ORIGINAL_TYPES = ("t2v", "i2v", "ti2v", "flf2v")


def transformer_config_original(
    config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]] | None = None
) -> WanTransformerConfig:
    """Read the ``config.json`` beside an original transformer.

    ``shapes``: the sizes of the checkpoint's tensors by their original names. They tell the image-to-video models of
    2.1 and of 2.2 apart, whose configs are equal, so those two need them; without them the text is 4096 wide.

    Raises:
        ConfigError: a required value is missing, or a value describes another architecture.
    """
    where = "config.json"
    _check(config, where, "_class_name", "WanModel")
    kind = _require(config, where, "model_type")
    if kind not in _ORIGINAL_TYPES:
        raise ConfigError(f"{where} has model_type={kind!r}; this code builds {', '.join(_ORIGINAL_TYPES)}")
    if shapes is None and kind in ("i2v", "flf2v"):
        raise ConfigError(
            f"{where} has model_type={kind!r}, which 2.1 and 2.2 build differently; "
            f"give the shapes of the checkpoint's tensors too"
        )
    _check(config, where, "text_len", TEXT_TOKENS)
    shapes = shapes or {}
    width, num_heads = _require(config, where, "dim"), _require(config, where, "num_heads")
    if width % num_heads:
        raise ConfigError(f"{where} has dim={width}, which its num_heads={num_heads} does not divide")
    image = "img_emb.proj.1.weight" in shapes
    positions = shapes.get("img_emb.emb_pos")
    return _checked_transformer(
        WanTransformerConfig(
            num_attention_heads=num_heads,
            attention_head_dim=width // num_heads,
            in_channels=_require(config, where, "in_dim"),
            out_channels=_require(config, where, "out_dim"),
            text_dim=shapes.get("text_embedding.0.weight", (width, 4096))[1],
            freq_dim=_require(config, where, "freq_dim"),
            ffn_dim=_require(config, where, "ffn_dim"),
            num_layers=_require(config, where, "num_layers"),
            eps=_require(config, where, "eps"),
            image_dim=shapes["img_emb.proj.1.weight"][1] if image else None,
            added_kv_proj_dim=width if image else None,
            pos_embed_seq_len=None if positions is None else positions[1],
        ),
        where,
    )


def vae_config(config: Mapping[str, Any]) -> WanVaeConfig:
    """Read the ``vae/config.json`` of a diffusers folder; keys that describe no size are ignored.

    What 2.1's leaves out is 2.1's.

    Raises:
        ConfigError: a required value is missing, or a value describes another architecture.
    """
    where = "vae/config.json"
    _check(config, where, "_class_name", "AutoencoderKLWan")
    _check(config, where, "attn_scales", [])
    return _checked_vae(
        WanVaeConfig(
            base_dim=_require(config, where, "base_dim"),
            z_dim=_require(config, where, "z_dim"),
            latents_mean=tuple(_require(config, where, "latents_mean")),
            latents_std=tuple(_require(config, where, "latents_std")),
            decoder_base_dim=config.get("decoder_base_dim"),
            dim_mult=tuple(_require(config, where, "dim_mult")),
            num_res_blocks=_require(config, where, "num_res_blocks"),
            temporal_downsample=tuple(_require(config, where, "temperal_downsample")),
            in_channels=config.get("in_channels", 3),
            out_channels=config.get("out_channels", 3),
            patch_size=config.get("patch_size"),
            is_residual=config.get("is_residual", False),
            scale_factor_temporal=config.get("scale_factor_temporal", 4),
            scale_factor_spatial=config.get("scale_factor_spatial", 8),
        ),
        where,
    )


def _checked_transformer(config: WanTransformerConfig, where: str) -> WanTransformerConfig:
    if config.attention_head_dim % 2:
        raise ConfigError(f"{where} has heads of {config.attention_head_dim} values; positions turn pairs of values")
    if config.freq_dim % 2:
        raise ConfigError(f"{where} has freq_dim={config.freq_dim}; a timestep is as many cosines as sines")
    if (config.image_dim is None) != (config.added_kv_proj_dim is None):
        raise ConfigError(
            f"{where} has image_dim={config.image_dim} and added_kv_proj_dim={config.added_kv_proj_dim}; "
            f"a model that reads image tokens has both, any other neither"
        )
    if config.added_kv_proj_dim not in (None, config.width):
        raise ConfigError(
            f"{where} has added_kv_proj_dim={config.added_kv_proj_dim}; image tokens arrive in the model's width, "
            f"{config.width}"
        )
    if config.pos_embed_seq_len is not None and config.image_dim is None:
        raise ConfigError(f"{where} has pos_embed_seq_len={config.pos_embed_seq_len} and no image_dim to place")
    return config


def _checked_vae(config: WanVaeConfig, where: str) -> WanVaeConfig:
    if not len(config.latents_mean) == len(config.latents_std) == config.z_dim:
        raise ConfigError(
            f"{where} has z_dim={config.z_dim}, {len(config.latents_mean)} latents_mean and "
            f"{len(config.latents_std)} latents_std; give one of each per latent channel"
        )
    if len(config.temporal_downsample) != len(config.dim_mult) - 1:
        raise ConfigError(
            f"{where} has {len(config.dim_mult)} levels and {len(config.temporal_downsample)} temperal_downsample; "
            f"all levels but the last have one"
        )
    scales = {
        "scale_factor_temporal": 2 ** sum(config.temporal_downsample),
        "scale_factor_spatial": 2 ** len(config.temporal_downsample) * (config.patch_size or 1),
    }
    for name, scale in scales.items():
        if getattr(config, name) != scale:
            raise ConfigError(f"{where} has {name}={getattr(config, name)}; its levels and patches make {scale}")
    pixels = 3 * (config.patch_size or 1) ** 2
    if not config.in_channels == config.out_channels == pixels:
        raise ConfigError(
            f"{where} has {config.in_channels} channels in and {config.out_channels} out; RGB in patches of "
            f"{config.patch_size or 1} is {pixels}"
        )
    return config


def _require(config: Mapping[str, Any], where: str, key: str) -> Any:
    if config.get(key) is None:
        raise ConfigError(f"{where} lacks '{key}'; use the file that came with the weights")
    return config[key]


def _check(config: Mapping[str, Any], where: str, key: str, value: Any) -> None:
    """A key that is there has the only value that this code builds."""
    found = config.get(key, value)
    if (list(found) if isinstance(found, tuple) else found) != value:
        raise ConfigError(f"{where} has {key}={found!r}; this code builds {value!r} only")
