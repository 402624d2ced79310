"""Wan VAEs, 2.1 (16 latent channels) and 2.2 (48): frames to latents and back, chunk by chunk.

Shapes: B batch, C channels, F frames, H, W height and width, in pixels for frames and in latents for latents. T, S: the
config's scale factors along time (4) and space (8 or 16).

A chunk is some latent frames; the first one of a clip is one frame, any other T. ``encode_chunk`` and ``decode_chunk``
take the state that the previous chunk left, None for the first, and return the one that they leave: nothing is kept on
the module, and any chunks give the result of the whole clip. After the first chunk all states have one shape.

Latents here are the VAE's own: ``normalize_latents`` makes those of the transformer, ``denormalize_latents`` goes back.

Names are those of diffusers' ``AutoencoderKLWan``, an encoder and a decoder having the halves of them. Source:
huggingface/diffusers 0.42.1, ``autoencoder_kl_wan.py``; Wan-Video/Wan2.2 at 42bf4cf, ``modules/{vae2_1,vae2_2}.py``.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from vgen.models.memory_format import memory_format_of, space_cells
from vgen.models.wan.config import WanVaeConfig
from vgen.models.wan.vae_blocks import (
    Carry,
    CausalConv3d,
    Downsample,
    MidBlock,
    PixelNorm,
    ResBlock,
    State,
    Upsample,
    add_averaged,
    add_repeated,
    run_blocks,
)
from vgen.models.wan.vae_levels import (
    Level,
    decoder_levels,
    encoder_levels,
    kept_phases,
    most_decoder_frames,
    most_encoder_frames,
)


def normalize_latents(latents: Tensor, config: WanVaeConfig) -> Tensor:
    """The VAE's latents [B, C, F, H, W] as the transformer knows them, of mean 0 and deviation 1, in their dtype."""
    mean, std = _statistics(latents, config)
    return (latents - mean) / std


def denormalize_latents(latents: Tensor, config: WanVaeConfig) -> Tensor:
    """The transformer's latents [B, C, F, H, W] as the VAE knows them, in their dtype: give fp32."""
    mean, std = _statistics(latents, config)
    return latents * std + mean


def _statistics(latents: Tensor, config: WanVaeConfig) -> tuple[Tensor, ...]:
    return tuple(latents.new_tensor(values).view(-1, 1, 1, 1) for values in (config.latents_mean, config.latents_std))


class _ResidualDownBlock(nn.Module):
    """A level of 2.2's encoder: its input, averaged, is added to its output."""

    def __init__(self, level: Level, num_res_blocks: int) -> None:
        super().__init__()
        kept_phases(level.phases, fine=level.in_channels, coarse=level.resampled)
        self.level = level
        self.resnets = _res_blocks(level, num_res_blocks)
        self.downsampler = Downsample(level) if level.space > 1 else None

    def forward(self, x: Tensor, carry: Carry) -> Tensor:
        out = run_blocks(self.resnets, x, carry)
        if self.downsampler is not None:
            out = self.downsampler(out, carry)
        add_averaged(out, x, self.level, carry.first)
        return out


class _UpBlock(nn.Module):
    """A level of 2.1's decoder."""

    def __init__(self, level: Level, num_res_blocks: int) -> None:
        super().__init__()
        self.resnets = _res_blocks(level, num_res_blocks)
        self.upsamplers = nn.ModuleList([Upsample(level)] if level.space > 1 else [])

    def forward(self, x: Tensor, carry: Carry) -> Tensor:
        return run_blocks(self.upsamplers, run_blocks(self.resnets, x, carry), carry)


class _ResidualUpBlock(nn.Module):
    """A level of 2.2's decoder: its input, repeated, is added to its output if it resamples."""

    def __init__(self, level: Level, num_res_blocks: int) -> None:
        super().__init__()
        self.level = level
        self.resnets = _res_blocks(level, num_res_blocks)
        self.upsampler = None
        if level.space > 1:
            kept_phases(level.phases, fine=level.resampled, coarse=level.in_channels)
            self.upsampler = Upsample(level)

    def forward(self, x: Tensor, carry: Carry) -> Tensor:
        out = run_blocks(self.resnets, x, carry)
        if self.upsampler is not None:
            out = self.upsampler(out, carry)
            add_repeated(out, x, self.level, carry.first)
        return out


def _res_blocks(level: Level, count: int) -> nn.ModuleList:
    return nn.ModuleList(
        ResBlock(level.channels if index else level.in_channels, level.channels) for index in range(count)
    )


class _Encoder(nn.Module):
    def __init__(self, config: WanVaeConfig) -> None:
        super().__init__()
        levels = encoder_levels(config)
        width = levels[-1].channels
        self.conv_in = CausalConv3d(config.in_channels, levels[0].in_channels)
        self.down_blocks = nn.ModuleList()
        for level in levels:
            if config.is_residual:
                self.down_blocks.append(_ResidualDownBlock(level, config.num_res_blocks))
            else:
                self.down_blocks.extend(_res_blocks(level, config.num_res_blocks))
                if level.space > 1:
                    self.down_blocks.append(Downsample(level))
        self.mid_block = MidBlock(width)
        self.norm_out = PixelNorm(width, 3)
        self.conv_out = CausalConv3d(width, 2 * config.z_dim)

    def forward(self, patches: Tensor, carry: Carry) -> Tensor:
        """[B, C, p, p, F, H/p, W/p] -> means and log variances [B, 2 * z_dim, F', H/S, W/S]."""
        x = self.conv_in(self.conv_in.bordered(patches, carry))
        x = run_blocks(self.down_blocks, x, carry)
        x = self.mid_block(x, carry)
        out: Tensor = self.conv_out(self.conv_out.bordered(x, carry, self.norm_out))
        return out


class VideoEncoder(nn.Module):
    """Frames to the means of latents; the other half of the checkpoint's tensors is ``VideoDecoder``'s."""

    def __init__(self, config: WanVaeConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = _Encoder(config)
        self.quant_conv = nn.Conv3d(2 * config.z_dim, 2 * config.z_dim, 1)

    @torch.no_grad()
    def forward(self, frames: Tensor, chunk: int | None = 1) -> Tensor:
        """Encode frames [B, 3, F, H, W], -1 to 1, to latents [B, z_dim, (F-1)/T + 1, H/S, W/S].

        ``chunk``: latent frames at a time; None, or more than keep every tensor below 2^31 elements, means as many as
        do. Computes in the dtype of the weights, which the latents have.

        Raises:
            ValueError: F is not ``Tk + 1``, H or W is not a multiple of S, or one latent frame is too large.
        """
        validate_frames(self.config, *frames.shape[2:])
        time, space = self.config.scale_factor_temporal, self.config.scale_factor_spatial
        B, _, num_frames, height, width = frames.shape
        shape = (B, self.config.z_dim, (num_frames - 1) // time + 1, height // space, width // space)
        chunk = chunk_length(chunk, most_encoder_frames(self.config, shape), "encode", shape)
        lengths = [min(chunk, shape[2] - start) * time for start in range(0, shape[2], chunk)]
        lengths[0] -= time - 1
        state: State | None = None
        latents = []
        for part in frames.split(lengths, dim=2):
            means, state = self.encode_chunk(part, state)
            latents.append(means)
        return torch.cat(latents, dim=2)

    @torch.no_grad()
    def encode_chunk(self, frames: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Latents [B, z_dim, k, H/S, W/S] of Tk frames [B, 3, F, H, W], T(k-1) + 1 in the first chunk, and the state.

        Sizes are not checked.
        """
        carry = Carry(state)
        patch = self.config.patch_size or 1
        patches = space_cells(frames, patch, 1).squeeze(1).permute(0, 1, 6, 4, 2, 3, 5)
        moments: Tensor = self.quant_conv(self.encoder(patches, carry))
        return moments[:, : self.config.z_dim], carry.state


class _Decoder(nn.Module):
    def __init__(self, config: WanVaeConfig) -> None:
        super().__init__()
        levels = decoder_levels(config)
        block = _ResidualUpBlock if config.is_residual else _UpBlock
        self.conv_in = CausalConv3d(config.z_dim, levels[0].in_channels)
        self.mid_block = MidBlock(levels[0].in_channels)
        self.up_blocks = nn.ModuleList(block(level, config.num_res_blocks + 1) for level in levels)
        self.norm_out = PixelNorm(levels[-1].channels, 3)
        self.conv_out = CausalConv3d(levels[-1].channels, config.out_channels)

    def forward(self, z: Tensor, carry: Carry) -> Tensor:
        """[B, z_dim, F, H, W] -> patches of pixels [B, 3pp, F', SH/p, SW/p]."""
        x = self.conv_in(self.conv_in.bordered(z, carry))
        x = self.mid_block(x, carry)
        x = run_blocks(self.up_blocks, x, carry)
        out: Tensor = self.conv_out(self.conv_out.bordered(x, carry, self.norm_out))
        return out


class VideoDecoder(nn.Module):
    """Latents to frames; the other half of the checkpoint's tensors is ``VideoEncoder``'s."""

    def __init__(self, config: WanVaeConfig) -> None:
        super().__init__()
        self.config = config
        self.post_quant_conv = nn.Conv3d(config.z_dim, config.z_dim, 1)
        self.decoder = _Decoder(config)

    def forward(self, latents: Tensor, chunk: int | None = 1) -> Tensor:
        """All frames of ``decode`` in one tensor [B, 3, T(F-1) + 1, SH, SW], in the memory format of the weights."""
        parts = self.decode(latents, chunk)
        B, _, latent_frames, H, W = latents.shape
        time, space = self.config.scale_factor_temporal, self.config.scale_factor_spatial
        frames = self._empty_frames(latents, B, time * (latent_frames - 1) + 1, space * H, space * W)
        start = 0
        for part in parts:
            frames[:, :, start : start + part.shape[2]].copy_(part)
            start += part.shape[2]
        return frames

    def decode(self, latents: Tensor, chunk: int | None = 1) -> Iterator[Tensor]:
        """Decode latents [B, z_dim, F, H, W] to chunks of frames [B, 3, f, SH, SW], about -1 to 1, not clamped.

        ``chunk``: latent frames at a time; None, or more than keep every tensor below 2^31 elements, means as many as
        do. Computes in the dtype of the weights; the frames have the dtype of the latents.

        Raises:
            ValueError: a chunk of no latent frame, or one latent frame is too large.
        """
        chunk = chunk_length(chunk, most_decoder_frames(self.config, latents.shape), "decode", latents.shape)
        return self._decode_parts(latents.split(chunk, dim=2))

    def _decode_parts(self, parts: Iterable[Tensor]) -> Iterator[Tensor]:
        state: State | None = None
        for part in parts:
            frames, state = self.decode_chunk(part, state)
            yield frames

    @torch.no_grad()
    def decode_chunk(self, latents: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Tk frames [B, 3, Tk, SH, SW] of k latents [B, z_dim, k, H, W], T(k-1) + 1 in the first chunk, and the state.

        Sizes are not checked.
        """
        carry = Carry(state)
        weight = self.decoder.conv_in.weight
        z = latents.to(weight.dtype).contiguous(memory_format=memory_format_of(weight))
        patches = self.decoder(self.post_quant_conv(z), carry)
        return self._unpatchify(patches).to(latents.dtype), carry.state

    def _unpatchify(self, patches: Tensor) -> Tensor:
        """[B, (3 p p), F, H, W] -> [B, 3, F, pH, pW]; the width offset is the slower of the two patch axes."""
        p = self.config.patch_size or 1
        if p == 1:
            return patches
        B, _, num_frames, H, W = patches.shape
        frames = self._empty_frames(patches, B, num_frames, p * H, p * W)
        cells = patches.unflatten(1, (-1, p, p)).permute(0, 1, 4, 5, 3, 6, 2)
        space_cells(frames, p, 1).squeeze(1).copy_(cells)
        return frames

    def _empty_frames(self, like: Tensor, B: int, num_frames: int, H: int, W: int) -> Tensor:
        return torch.empty(
            (B, self.config.out_channels // (self.config.patch_size or 1) ** 2, num_frames, H, W),
            dtype=like.dtype,
            device=like.device,
            memory_format=memory_format_of(self.decoder.conv_in.weight),
        )


def validate_frames(config: WanVaeConfig, num_frames: int, height: int, width: int) -> None:
    """Refuse clips that do not divide into latents.

    Raises:
        ValueError: ``num_frames`` is not ``Tk + 1``, or a side is not a multiple of S.
    """
    time, space = config.scale_factor_temporal, config.scale_factor_spatial
    if num_frames < 1 or (num_frames - 1) % time:
        below = (num_frames - 1) // time * time + 1
        fix = f"{below} or {below + time}" if num_frames > 1 else "1"
        raise ValueError(f"num_frames={num_frames} is not {time}k + 1: use {fix}")
    for name, size in (("height", height), ("width", width)):
        if size < space or size % space:
            below = size // space * space
            fix = f"{below} or {below + space}" if below else str(space)
            raise ValueError(f"{name}={size} is not a multiple of {space}: use {fix}")


def chunk_length(chunk: int | None, most: int, verb: str, shape: tuple[int, ...]) -> int:
    """The length of chunks to use: ``chunk``, or less, where ``most`` frames of latents of ``shape`` are possible.

    Raises:
        ValueError: a chunk of no latent frame, or none is possible.
    """
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk={chunk} latent frames is none: use 1 or more, or null for as many as possible")
    if most < 1:
        raise ValueError(
            f"one frame of latents of {shape[3]}x{shape[4]} (height x width) needs a tensor of 2^31 elements or more, "
            f"beyond what convolutions index: {verb} in tiles"
        )
    return most if chunk is None else min(chunk, most)
