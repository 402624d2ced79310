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

PAD, BOS, UNKNOWN = (SPECIAL_TOKENS.index(token) for token in ("<pad>", "<bos>", "<unk>"))


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


def text_tokens(texts: Sequence[str], max_length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """``input_ids`` and ``attention_mask`` int64 [B, L] of any texts, as the pipeline makes them."""
    tokens = Tokenizer(build_tokenizer(), bos_id=BOS, pad_id=PAD).tokenize(texts, max_length)
    return tokens.input_ids.to(device), tokens.attention_mask.to(device)


def one_text(text: str, max_length: int) -> tuple[Tensor, Tensor]:
    """``input_ids`` int32 and ``attention_mask`` bool [L] of one text."""
    ids, mask = text_tokens([text], max_length, torch.device("cpu"))
    return ids[0].int(), mask[0].bool()


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


def with_unknown(
    tokens: tuple[Tensor, Tensor], unknown_id: int, rows: Tensor, rate: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """``tokens`` [B, L] with each word of the ``rows`` (bool [B]) replaced by ``unknown_id`` with probability ``rate``.

    So that a word from outside the grammar, which becomes this token, is nothing new. Special tokens stay.
    """
    ids, mask = tokens
    drawn = torch.rand(ids.shape, generator=generator, device=ids.device) < rate
    return ids.masked_fill(drawn & rows[:, None] & (ids >= len(SPECIAL_TOKENS)), unknown_id), mask
