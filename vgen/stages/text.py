"""Prompts to the context both streams of the transformer attend to."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from vgen.models.gemma3 import Tokenizer, encode_hidden_states
from vgen.models.ltx2.connectors import TextConnectors
from vgen.models.tokenizer import TextTokenizer

notice = logging.getLogger("vgen.notice")

_FEW_WORDS = 100
"""A vocabulary of no more is named in full."""


@dataclass(frozen=True)
class Context:
    """``video``, ``audio``: ``[1, L, D]`` of one prompt, every slot attended."""

    video: Tensor
    audio: Tensor


EncodePrompts = Callable[[Sequence[str]], list[Context]]
"""Prompts to their contexts, in order."""


@dataclass(frozen=True)
class TextComponents:
    tokenizer: Tokenizer
    text_encoder: nn.Module
    connectors: TextConnectors
    max_length: int
    told: set[str] = field(default_factory=set)
    """Prompts that were checked, so that each is told of once."""


def encode_prompts(components: TextComponents, prompts: Sequence[str], device: torch.device) -> list[Context]:
    """Encode prompts one at a time, so that a prompt's context does not depend on its neighbours."""
    return [_encode_one(components, prompt, device) for prompt in prompts]


def _encode_one(components: TextComponents, prompt: str, device: torch.device) -> Context:
    tokens = components.tokenizer.tokenize([prompt], components.max_length)
    if prompt not in components.told:
        components.told.add(prompt)
        tell(components.tokenizer, prompt, tokens.dropped[0], components.max_length)
    attention_mask = tokens.attention_mask.to(device)
    hidden_states = encode_hidden_states(components.text_encoder, tokens.input_ids.to(device), attention_mask)
    video, audio = components.connectors(hidden_states, attention_mask)
    return Context(video, audio)


def tell(tokenizer: TextTokenizer, prompt: str, dropped: int, max_length: int) -> None:
    """Say what of a prompt does not reach the model."""
    unknown = tokenizer.unknown_words(prompt)
    if unknown:
        known = tokenizer.known_words()
        notice.warning(
            "the model does not know %s and hears an unknown word in place of each%s",
            ", ".join(f"'{word}'" for word in unknown),
            f"; it knows: {', '.join(known)}" if len(known) <= _FEW_WORDS else "",
        )
    if dropped:
        notice.warning(
            "the prompt is %d tokens longer than the %d that the text encoder takes; its end is cut: …%s",
            dropped,
            max_length,
            prompt[-60:],
        )
