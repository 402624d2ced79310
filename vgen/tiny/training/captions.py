"""Captions of scenes as tokens, drawn once for many clips.

Shapes: B clips, K wordings of each, L text tokens.
"""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from vgen.tiny.grammar import Scene, caption
from vgen.tiny.tokenizer import TextFormat, build_tokenizer

Tokens = tuple[Tensor, Tensor]
"""``input_ids`` and ``attention_mask``."""


def caption_tokens(
    scenes: Sequence[Scene], wordings: int, max_length: int, seed: int, text_format: TextFormat
) -> Tokens:
    """``input_ids`` int32 and ``attention_mask`` bool, both [B, K, L].

    Raises:
        ValueError: a caption is longer than ``max_length``.
    """
    draw = random.Random(f"{seed}/captions")
    texts = [caption(scene, draw) for scene in scenes for _ in range(wordings)]
    ids, mask = text_tokens(texts, max_length, text_format)
    grid = (len(scenes), wordings, max_length)
    return ids.int().view(grid), mask.bool().view(grid)


def text_tokens(texts: Sequence[str], max_length: int, text_format: TextFormat) -> Tokens:
    """``input_ids`` and ``attention_mask`` int64 [B, L] of any texts, as the pipeline makes them.

    In one batch, where the pipeline's tokenizers go prompt by prompt: there are hundreds of thousands.

    Raises:
        ValueError: a text is longer than ``max_length``.
    """
    tokenizer = build_tokenizer(text_format)
    tokenizer.enable_padding(direction=text_format.padding_side, pad_id=text_format.pad_id, length=max_length)
    encoded = tokenizer.encode_batch(list(texts))
    longest = max(len(one.ids) for one in encoded)
    if longest > max_length:
        raise ValueError(f"a caption has {longest} tokens and max_length={max_length}; use {longest} or more")
    return torch.tensor([one.ids for one in encoded]), torch.tensor([one.attention_mask for one in encoded])


def one_text(text: str, max_length: int, text_format: TextFormat) -> Tokens:
    """``input_ids`` int32 and ``attention_mask`` bool [L] of one text."""
    ids, mask = text_tokens([text], max_length, text_format)
    return ids[0].int(), mask[0].bool()


def choose(tokens: Tokens, clips: Tensor, wordings: Tensor) -> Tokens:
    """One wording for each of ``clips`` [B]: int64 [B, L] each."""
    ids, mask = (tensor[clips, wordings].long() for tensor in tokens)
    return ids, mask


def with_dropout(tokens: Tokens, empty: Tokens, dropped: Tensor) -> Tokens:
    """``tokens`` with those of ``empty`` where ``dropped`` [B] says so."""
    ids, mask = (
        torch.where(dropped[:, None], nothing[None].to(full.dtype), full)
        for full, nothing in zip(tokens, empty, strict=True)
    )
    return ids, mask


def with_unknown(
    tokens: Tokens, text_format: TextFormat, rows: Tensor, rate: float, generator: torch.Generator
) -> Tokens:
    """``tokens`` [B, L] with each word of the ``rows`` (bool [B]) replaced by ``<unk>`` with probability ``rate``.

    So that a word from outside the grammar, which becomes this token, is nothing new. Special tokens stay.
    """
    ids, mask = tokens
    drawn = torch.rand(ids.shape, generator=generator, device=ids.device) < rate
    words = ids >= len(text_format.special_tokens)
    return ids.masked_fill(drawn & rows[:, None] & words, text_format.unknown_id), mask
