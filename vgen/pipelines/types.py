"""Records that pipelines take and give."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from vgen.graph.pool import GraphPool
from vgen.models.ltx2.config import LTX2Config
from vgen.models.ltx2.transformer import LTX2Transformer
from vgen.residency import Residency
from vgen.stages.decode import AudioComponents, DecodeVideo, Fallback, Sound
from vgen.stages.denoise import Conditioning, Step
from vgen.stages.encode import Encoders, EncodeVideo
from vgen.stages.text import EncodePrompts


@dataclass(frozen=True)
class Decoders:
    """``audio`` is None on a rank that decodes its part of the video only."""

    decode_video: DecodeVideo
    audio: AudioComponents | None
    fallbacks: tuple[Fallback, ...] = ()


@dataclass(frozen=True)
class Components:
    """A model ready to run: built and transformed by ``vgen.transforms``.

    ``encoders`` is None where no request brings an image, a clip or a sound. ``residency`` knows which parts wait in
    host memory: what a stage needs is used within ``residency.use(part, …)``. ``decoders`` is None on a rank that only
    denoises; ``hand_over`` gives the final video latents to ranks that only decode. ``graph_pool``: of what is
    captured; None where nothing is.
    """

    architecture: LTX2Config
    encode_prompts: EncodePrompts
    transformer: LTX2Transformer
    make_step: Callable[[Conditioning], Step]
    decoders: Decoders | None
    encoders: Encoders | None
    residency: Residency
    device: torch.device
    dtype: torch.dtype
    hand_over: Callable[[Tensor], None] = lambda _: None
    graph_pool: GraphPool | None = None


@dataclass(frozen=True)
class Follower:
    """A rank that only decodes. ``encode_video`` is None where no request brings an image or a clip; ``receive`` waits
    for the final video latents ``[1, C, F, H, W]``."""

    decoders: Decoders
    encode_video: EncodeVideo | None
    receive: Callable[[], Tensor]
    residency: Residency
    device: torch.device
    dtype: torch.dtype


class Sink(Protocol):
    """Takes what a pipeline makes, in this order."""

    def save_latents(self, video: Tensor, audio: Tensor | None) -> None: ...

    def write(self, frames: Iterator[Tensor], sound: Sound | None) -> None:
        """``frames``: groups of ``[1, 3, f, H, W]`` on the device, decoded as they are asked for. Called again, with
        all of them, where memory ran out in the middle."""

    def note_fallback(self, name: str) -> None:
        """The frames came by this fallback."""
