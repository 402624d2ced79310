"""LTX-2 vocoder: a generator from a stereo log-mel spectrogram to a waveform, HiFi-GAN in 2.0, BigVGAN in 2.3.

Both are one stack of transposed convolutions with residual blocks between; they differ in their activations.

Shapes: B batch, C channels of the level at hand, T time (mel frames, then samples), M mel bins.
Source: Lightricks/LTX-2 at 400fd31, ``model/audio_vae/{vocoder,resnet}.py``; HiFi-GAN, arXiv 2010.05646.
"""

from math import prod

import torch
from torch import Tensor, nn

from vgen.models.ltx2.config import VocoderConfig
from vgen.models.ltx2.snake import AntiAliasedSnake

SLOPE = 0.1
FINAL_SLOPE = 0.01
"""The last activation has torch's default slope in the trained model, unlike all others."""


class ResBlock(nn.Module):
    """Per dilation: x += conv(act(dilated conv(act(x))))."""

    def __init__(self, channels: int, kernel_size: int, dilations: tuple[int, ...], *, snake: bool) -> None:
        super().__init__()
        self.convs1 = nn.ModuleList(_same_conv(channels, kernel_size, dilation) for dilation in dilations)
        self.convs2 = nn.ModuleList(_same_conv(channels, kernel_size, 1) for _ in dilations)
        self.acts1, self.acts2 = (
            nn.ModuleList(AntiAliasedSnake(channels) if snake else nn.LeakyReLU(SLOPE) for _ in dilations)
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, T] -> [B, C, T]."""
        for act1, dilated, act2, plain in zip(self.acts1, self.convs1, self.acts2, self.convs2, strict=True):
            x = x + plain(act2(dilated(act1(x))))
        return x


def _same_conv(channels: int, kernel_size: int, dilation: int) -> nn.Conv1d:
    return nn.Conv1d(channels, channels, kernel_size, dilation=dilation, padding=dilation * (kernel_size - 1) // 2)


class Vocoder(nn.Module):
    """The generator as built from its config: 55.6 M parameters in 194 tensors in LTX-2 2.0, 24 kHz stereo.

    In 2.3 it is half of a ``BandwidthExtendedVocoder``.

    Raises:
        ValueError: a kernel does not fit its rate or is even where it must be odd.
    """

    def __init__(self, config: VocoderConfig) -> None:
        super().__init__()
        _validate_config(config)
        self.config = config
        snake = config.resblock == "AMP1"
        widths = [config.initial_channels // 2**level for level in range(len(config.upsample_rates) + 1)]
        self.conv_pre = nn.Conv1d(config.in_channels, widths[0], 7, padding=3)
        # BigVGAN has no activation before a transposed convolution.
        self.act_up = nn.Identity() if snake else nn.LeakyReLU(SLOPE)
        self.ups = nn.ModuleList(
            nn.ConvTranspose1d(wider, width, kernel, rate, padding=(kernel - rate) // 2)
            for wider, width, rate, kernel in zip(
                widths, widths[1:], config.upsample_rates, config.upsample_kernel_sizes, strict=False
            )
        )
        self.resblocks = nn.ModuleList(
            ResBlock(width, kernel, dilations, snake=snake)
            for width in widths[1:]
            for kernel, dilations in zip(config.resblock_kernel_sizes, config.resblock_dilations, strict=True)
        )
        self.act_post = AntiAliasedSnake(widths[-1]) if snake else nn.LeakyReLU(FINAL_SLOPE)
        self.conv_post = nn.Conv1d(widths[-1], config.out_channels, 7, padding=3, bias=config.final_bias)
        self.bound = {"tanh": nn.Tanh(), "clamp": nn.Hardtanh(), "none": nn.Identity()}[config.final_activation]

    @property
    def samples_per_frame(self) -> int:
        """Waveform samples per mel frame: 240 in LTX-2 2.0."""
        return prod(self.config.upsample_rates)

    @property
    def output_sample_rate(self) -> int:
        """Of the waveform, in Hz: 24000 in LTX-2 2.0."""
        return self.config.output_sample_rate

    def forward(self, mel: Tensor) -> Tensor:
        """Log-mel spectrogram [B, 2, T, M] -> waveform [B, 2, T * samples_per_frame], in mel's dtype.

        From -1 to 1 unless the config leaves it unbounded. Computes in the dtype of the weights.

        Raises:
            ValueError: the spectrogram has other channels or mel bins than the config, or no frames.
        """
        _check_mel(mel, self.config)
        # The convolution reads 2M channels, the stereo channel being the slower of the two.
        x = mel.to(self.conv_pre.weight.dtype).transpose(2, 3).flatten(1, 2)
        x = self.conv_pre(x)
        parallel = len(self.config.resblock_kernel_sizes)
        for level, up in enumerate(self.ups):
            x = up(self.act_up(x))
            blocks = self.resblocks[level * parallel : (level + 1) * parallel]
            x = torch.stack([block(x) for block in blocks]).mean(dim=0)
        waveform: Tensor = self.bound(self.conv_post(self.act_post(x)))
        return waveform.to(mel.dtype)


def _check_mel(mel: Tensor, config: VocoderConfig) -> None:
    channels, bins = config.out_channels, config.in_channels // config.out_channels
    if mel.ndim != 4 or mel.shape[1] != channels or mel.shape[3] != bins or not mel.shape[2]:
        raise ValueError(
            f"the vocoder got a mel spectrogram of shape {list(mel.shape)}; it reads [B, channels, frames, bins] with "
            f"{channels} channels, {bins} mel bins and at least one frame: pass the audio decoder's output"
        )


def _validate_config(config: VocoderConfig) -> None:
    for rate, kernel in zip(config.upsample_rates, config.upsample_kernel_sizes, strict=True):
        if kernel < rate or (kernel - rate) % 2:
            raise ValueError(
                f"the vocoder's config upsamples by {rate} with a kernel of {kernel}; "
                f"the kernel must exceed the rate by an even number: use one of {rate}, {rate + 2}, ..."
            )
    for kernel in config.resblock_kernel_sizes:
        if kernel % 2 == 0:
            raise ValueError(f"the vocoder's config has a residual kernel of {kernel}; use an odd size")
