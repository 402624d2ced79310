"""Captions of scenes as tokens, drawn once for many clips.

Shapes: B clips, K wordings of each, L text tokens.
"""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from vgen.models.gemma3 import Tokenizer
from vgen.tiny.grammar import Scene, caption
from vgen.tiny.tokenizer import SPECIAL_TOKENS, build_tokenizer

PAD, BOS = SPECIAL_TOKENS.index("<pad>"), SPECIAL_TOKENS.index("<bos>")


def caption_tokens(scenes: Sequence[Scene], wordings: int, max_length: int, seed: int) -> tuple[Tensor, Tensor]:
    """``input_ids`` int32 and ``attention_mask`` bool, both [B, K, L], padded on the left.

    Raises:
        ValueError: a caption is longer than ``max_length``.
    """
    draw = random.Random(f"{seed}/captions")
    texts = [caption(scene, draw) for scene in scenes for _ in range(wordings)]
    # In one batch, where Tokenizer.tokenize goes prompt by prompt: there are hundreds of thousands.
    rows = [encoding.ids for encoding in build_tokenizer().encode_batch(texts)]
    longest = max(map(len, rows))
    if longest > max_length:
        raise ValueError(f"a caption has {longest} tokens and max_length={max_length}; use {longest} or more")
    padded = torch.tensor([[PAD] * (max_length - len(row)) + row for row in rows], dtype=torch.int32)
    padded = padded.view(len(scenes), wordings, max_length)
    return padded, padded != PAD


def one_text(text: str, max_length: int) -> tuple[Tensor, Tensor]:
    """The same of one text, [L]."""
    tokens = Tokenizer(build_tokenizer(), bos_id=BOS, pad_id=PAD).tokenize([text], max_length)
    return tokens.input_ids[0].int(), tokens.attention_mask[0].bool()


def choose(tokens: tuple[Tensor, Tensor], clips: Tensor, wordings: Tensor) -> tuple[Tensor, Tensor]:
    """One wording for each of ``clips`` [B]: int64 [B, L] each."""
    ids, mask = (tensor[clips, wordings].long() for tensor in tokens)
    return ids, mask


def with_dropout(tokens: tuple[Tensor, Tensor], empty: tuple[Tensor, Tensor], dropped: Tensor) -> tuple[Tensor, Tensor]:
    """``tokens`` with those of ``empty`` where ``dropped`` [B] says so."""
    ids, mask = (
        torch.where(dropped[:, None], nothing[None].to(full.dtype), full)
        for full, nothing in zip(tokens, empty, strict=True)
    )
    return ids, mask
