"""What a stage makes, looked at while it trains: pictures, and how many clips do what their captions say.

Shapes: B clips, C channels, F frames, H, W pixels, S video tokens, A audio tokens, L text tokens, N audio samples.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL.Image import Image
from torch import Tensor

from vgen.config import TrainConfig
from vgen.media import to_uint8
from vgen.models.ltx2.audio_vae import AudioDecoder
from vgen.models.ltx2.video_vae import PerChannelStatistics
from vgen.models.ltx2.vocoder import Vocoder
from vgen.stages.latents import unpack_audio
from vgen.tiny.grammar import Split, captions, parse
from vgen.tiny.score import Score, score
from vgen.tiny.sheets import COLUMNS, Entry, contact_sheet, pick_frames
from vgen.tiny.training.captions import Tokens, text_tokens
from vgen.tiny.training.data import scenes_of, video_of
from vgen.tiny.training.families import Family
from vgen.tiny.training.video_vae import round_trip

SPLITS: tuple[Split, ...] = ("seen", "heldout")
PICTURE, SOUND = ("shape", "colour", "motion"), ("pitch", "loudness")

Make = Callable[[Tokens], tuple[Tensor, Tensor | None]]
"""Captions' tokens int64 [B, L] to the clips' video and audio tokens: ``generate`` with all else given."""


@dataclass(frozen=True, eq=False)
class Clip:
    """What was made of a caption. ``frames``: uint8 [F, H, W, 3]; ``score``: against all that the caption asks for."""

    split: Split
    caption: str
    frames: NDArray[np.uint8]
    score: Score


@dataclass(frozen=True, eq=False)
class SoundDecoders:
    audio: AudioDecoder
    vocoder: Vocoder


@dataclass(frozen=True, eq=False)
class Decoders:
    """What makes clips of tokens; ``video`` is the twin of the video VAE, whose latents have ``statistics``."""

    family: Family
    video: Any
    statistics: PerChannelStatistics
    sound: SoundDecoders | None = None


def judge(
    make: Make,
    decoders: Decoders,
    geometry: Any,
    config: TrainConfig,
    max_length: int,
    device: torch.device,
) -> list[Clip]:
    """``judged_clips`` of seen captions, then of as many held-out ones, all in one batch; wordings take turns.

    Without sound the frames alone are judged.
    """
    asked = [
        (split, wordings[index % len(wordings)])
        for split in SPLITS
        for index, wordings in enumerate(map(captions, scenes_of(config, 0, config.judged_clips, split)))
    ]
    ids, mask = text_tokens([text for _, text in asked], max_length, decoders.family.text_format)
    video, audio = make((ids.to(device), mask.to(device)))
    frames = decode_video(decoders, video, geometry)
    waveforms: Sequence[NDArray[np.float32] | None] = [None] * len(frames)
    rate = 0
    if decoders.sound is not None:
        assert audio is not None
        waveforms, rate = list(decode_audio(decoders.sound, audio)), decoders.sound.vocoder.output_sample_rate
    return [
        Clip(split, text, shown, score(shown, heard, rate, parse(text)))
        for (split, text), shown, heard in zip(asked, frames, waveforms, strict=True)
    ]


def adherence(clips: Sequence[Clip]) -> dict[str, float]:
    """Shares, by split, of the clips that have what their captions ask for.

    Of each attribute where it is asked for; ``picture`` is shape, colour and motion, ``passed`` the sound as well.
    """
    shares = {}
    for split in SPLITS:
        scores = [clip.score for clip in clips if clip.split == split]
        right = {name: [getattr(one, name) for one in scores] for name in (*PICTURE, *SOUND, "passed")}
        right["picture"] = [all(of_one) for of_one in zip(*(right[name] for name in PICTURE), strict=True)]
        for name, values in right.items():
            asked = [value for value in values if value is not None]
            shares.update({f"{split}_{name}": sum(asked) / len(asked)} if asked else {})
    return shares


def generations(clips: Sequence[Clip], count: int = 4) -> Image:
    """First, middle and last frames of ``count`` clips of each split, at most 8, over captions; failed ones marked."""
    shown = [clip for split in SPLITS for clip in [one for one in clips if one.split == split][:count]]
    return contact_sheet(
        [
            Entry(
                pick_frames(clip.frames),
                f"{clip.split}: {clip.caption}",
                tuple(name for name in (*PICTURE, *SOUND) if getattr(clip.score, name) is False),
            )
            for clip in shown
        ]
    )


def reconstructions(vae: Any, config: TrainConfig, device: torch.device) -> Image:
    """First, middle and last frames of 8 held-out clips, and below each line those of their round trips."""
    video = video_of(scenes_of(config, 0, 2 * COLUMNS, "heldout"), config.sizes[0], device)
    decoded, decibels = round_trip(vae, video)
    true = [Entry(pick_frames(frames), f"clip {index}") for index, frames in enumerate(_frames(video))]
    made = [
        Entry(pick_frames(frames), f"clip {index}, round trip: {decibels[index]:.1f} dB")
        for index, frames in enumerate(_frames(decoded))
    ]
    lines = slice(COLUMNS), slice(COLUMNS, None)
    return contact_sheet([entry for line in lines for entry in (*true[line], *made[line])])


@torch.no_grad()
def decode_video(decoders: Decoders, tokens: Tensor, geometry: Any) -> list[NDArray[np.uint8]]:
    """Frames uint8 [F, H, W, 3] of each clip of normalized ``tokens`` [B, S, C]."""
    latents = decoders.statistics(decoders.family.unpack(tokens, geometry))
    return _frames(decoders.video.decode(latents, return_dict=False)[0])


@torch.no_grad()
def decode_audio(sound: SoundDecoders, tokens: Tensor) -> NDArray[np.float32]:
    """Waveforms [B, 2, N] of normalized ``tokens`` [B, A, C]."""
    latents = unpack_audio(tokens, sound.audio.config.latent_mel_bins)
    waveforms: NDArray[np.float32] = sound.vocoder(sound.audio(latents)).float().cpu().numpy()
    return waveforms


def _frames(video: Tensor) -> list[NDArray[np.uint8]]:
    """Frames uint8 [F, H, W, 3] of each clip of ``video`` [B, 3, F, H, W] in about -1..1."""
    return [to_uint8(clip).cpu().numpy() for clip in video.split(1)]
