"""LTX-2.3 vocoder with bandwidth extension: a 16 kHz waveform, and a second generator that makes it 48 kHz.

The second generator reads the log-mel spectrogram of the first one's waveform and gives what a plain resampling of that
waveform lacks.

Numerics: everything computes in float32 whatever the dtype of the weights, as the official code does, which reports
spectral errors of 40 to 90 % from bfloat16 in so deep a chain. Weights keep their dtype; float32 copies of one part at
a time (0.5 GB at most in LTX-2.3) live for that part's forward only. On a GPU, float32 convolutions may be TF32 where
torch allows it, in the official code as here.

Shapes: B batch, C channels, S samples, T time of the second spectrogram (hops), M mel bins.
Source: Lightricks/LTX-2 at 400fd31, ``model/audio_vae/vocoder.py``.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from vgen.models.ltx2.config import BandwidthExtensionConfig, VocoderConfig
from vgen.models.ltx2.snake import upsample
from vgen.models.ltx2.vocoder import Vocoder

MEL_FLOOR = 1e-5
SINC_ROLLOFF = 0.99
"""Share of the band that the resampling filter passes."""
SINC_ZEROS = 6
"""Its zero crossings on either side."""


class CausalStft(nn.Module):
    """Magnitudes by a convolution with windowed Fourier bases, which the checkpoint holds as they were in training.

    ``inverse_basis`` is in the checkpoint too and has no use here.
    """

    def __init__(self, config: BandwidthExtensionConfig) -> None:
        super().__init__()
        self.hop_length = config.hop_length
        self.past = config.win_length - config.hop_length
        rows = 2 * (config.n_fft // 2 + 1)
        self.register_buffer("forward_basis", torch.zeros(rows, 1, config.n_fft))
        self.register_buffer("inverse_basis", torch.zeros(rows, 1, config.n_fft))

    def forward(self, waveform: Tensor) -> Tensor:
        """[B, S] -> [B, n_fft / 2 + 1, S / hop_length]; the padding lies in the past only."""
        padded = F.pad(waveform, (self.past, 0)).unsqueeze(1)
        real, imaginary = F.conv1d(padded, self.get_buffer("forward_basis"), stride=self.hop_length).chunk(2, dim=1)
        return torch.sqrt(real.square() + imaginary.square())


class MelStft(nn.Module):
    """Log-mel spectrogram with the checkpoint's own bases."""

    def __init__(self, config: BandwidthExtensionConfig) -> None:
        super().__init__()
        self.stft_fn = CausalStft(config)
        self.register_buffer("mel_basis", torch.zeros(config.mel_bins, config.n_fft // 2 + 1))

    def forward(self, waveform: Tensor) -> Tensor:
        """[B, C, S] -> [B, C, T, M]."""
        mel = self.get_buffer("mel_basis") @ self.stft_fn(waveform.flatten(0, 1))
        return mel.clamp(min=MEL_FLOOR).log().unflatten(0, waveform.shape[:2]).transpose(2, 3)


class BandwidthExtendedVocoder(nn.Module):
    """Both generators as built from their configs: 128.5 M parameters in 1227 tensors in LTX-2.3, 48 kHz stereo.

    Raises:
        ValueError: the rates, channels or mel bins of the parts do not fit each other.
    """

    def __init__(self, vocoder: VocoderConfig, extension: BandwidthExtensionConfig) -> None:
        super().__init__()
        _validate_configs(vocoder, extension)
        self.config = extension
        self.ratio = extension.output_sample_rate // extension.input_sample_rate
        self.vocoder = Vocoder(vocoder)
        self.bwe_generator = Vocoder(extension.generator)
        self.mel_stft = MelStft(extension)

    @property
    def samples_per_frame(self) -> int:
        """Waveform samples per mel frame: 480 in LTX-2.3."""
        return self.ratio * self.vocoder.samples_per_frame

    @property
    def output_sample_rate(self) -> int:
        """Of the waveform, in Hz: 48000 in LTX-2.3."""
        return self.config.output_sample_rate

    def forward(self, mel: Tensor) -> Tensor:
        """Log-mel spectrogram [B, 2, T, M] -> waveform [B, 2, T * samples_per_frame] in -1 to 1, in mel's dtype.

        Raises:
            ValueError: the spectrogram has other channels or mel bins than the config, or no frames.
        """
        # Bounded by its own last activation, before the second spectrogram: diffusers' config leaves it unbounded.
        narrow = _call_in_float32(self.vocoder, mel)
        samples = narrow.shape[2]
        narrow = F.pad(narrow, (0, -samples % self.config.hop_length))
        residual = _call_in_float32(self.bwe_generator, _call_in_float32(self.mel_stft, narrow))
        wide = (residual + resample(narrow, self.ratio)).clamp(-1, 1)
        return wide[..., : samples * self.ratio].to(mel.dtype)


def resample(waveform: Tensor, ratio: int) -> Tensor:
    """[B, C, S] -> [B, C, ratio * S] by a sinc under a Hann window, the same filter that torchaudio uses."""
    reach = math.ceil(SINC_ZEROS / SINC_ROLLOFF)
    # float32 whatever the waveform: the filter is no checkpoint's, so it must be the same for every dtype.
    time = torch.arange(2 * reach * ratio + 1, dtype=torch.float32, device=waveform.device)
    time = (time / ratio - reach) * SINC_ROLLOFF
    window = torch.cos(time.clamp(-SINC_ZEROS, SINC_ZEROS) * math.pi / SINC_ZEROS / 2).square()
    weights = torch.sinc(time) * window * SINC_ROLLOFF / ratio
    return upsample(waveform, weights.to(waveform.dtype).view(1, 1, -1), ratio, centre=reach * ratio)


def _call_in_float32(module: nn.Module, x: Tensor) -> Tensor:
    """``module(x)`` with float32 copies of the weights and of ``x``; float64 stays."""

    def widen(tensor: Tensor) -> Tensor:
        return tensor.to(torch.promote_types(tensor.dtype, torch.float32))

    weights = {name: widen(tensor) for name, tensor in module.state_dict().items()}
    out: Tensor = functional_call(module, weights, (widen(x),))
    return out


def _validate_configs(vocoder: VocoderConfig, extension: BandwidthExtensionConfig) -> None:
    narrow, wide, generator = extension.input_sample_rate, extension.output_sample_rate, extension.generator
    if vocoder.output_sample_rate != narrow or wide % narrow:
        raise ValueError(
            f"the bandwidth extension's config goes from {narrow} to {wide} Hz after a vocoder of "
            f"{vocoder.output_sample_rate} Hz; it must start at the vocoder's rate and end at a multiple of it"
        )
    if not extension.hop_length <= extension.win_length == extension.n_fft:
        raise ValueError(
            f"the bandwidth extension's config has a window of {extension.win_length} with n_fft {extension.n_fft} and "
            f"a hop of {extension.hop_length}; the window must equal n_fft and be no shorter than the hop"
        )
    samples = math.prod(generator.upsample_rates)
    if samples * narrow != extension.hop_length * wide:
        raise ValueError(
            f"the bandwidth extension's generator makes {samples} samples per frame; "
            f"a hop of {extension.hop_length} from {narrow} to {wide} Hz needs {extension.hop_length * wide // narrow}"
        )
    if generator.in_channels != vocoder.out_channels * extension.mel_bins or (
        generator.out_channels != vocoder.out_channels
    ):
        raise ValueError(
            f"the bandwidth extension's generator reads {generator.in_channels} channels and gives "
            f"{generator.out_channels}; {vocoder.out_channels} channels of {extension.mel_bins} mel bins need "
            f"{vocoder.out_channels * extension.mel_bins} and {vocoder.out_channels}"
        )
