"""Records that pipelines take and give."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from vgen.models.ltx2.config import LTX2Config
from vgen.models.ltx2.transformer import LTX2Transformer
from vgen.residency import Residency
from vgen.stages.decode import AudioComponents, DecodeVideo, Sound
from vgen.stages.denoise import Conditioning, Predict
from vgen.stages.encode import Encoders
from vgen.stages.text import EncodePrompts


@dataclass(frozen=True)
class Decoders:
    decode_video: DecodeVideo
    audio: AudioComponents


@dataclass(frozen=True)
class Components:
    """A model ready to run: built and transformed by ``vgen.transforms``.

    ``encoders`` is None where no request brings an image, a clip or a sound. ``residency`` knows which parts wait in
    host memory: what a stage needs is used within ``residency.use(part, …)``.
    """

    architecture: LTX2Config
    encode_prompts: EncodePrompts
    transformer: LTX2Transformer
    make_predict: Callable[[Conditioning], Predict]
    decoders: Decoders
    encoders: Encoders | None
    residency: Residency
    device: torch.device
    dtype: torch.dtype


class Sink(Protocol):
    """Takes what a pipeline makes, in this order."""

    def save_latents(self, video: Tensor, audio: Tensor | None) -> None: ...

    def write(self, frames: Iterator[Tensor], sound: Sound | None) -> None:
        """``frames``: groups of ``[1, 3, f, H, W]`` on the device, decoded as they are asked for."""
