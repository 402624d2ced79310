"""UMT5 as Wan's text encoder: the encoder of ``transformers``, the official cleaning and tokens, zeros after a prompt.

Shapes: B prompts, L tokens, D hidden size.
Source: Wan-Video/Wan2.1 at 9737cba, ``wan/modules/{t5,tokenizers}.py`` (the same in 2.2); the modules are those of
huggingface/transformers (5.17 and 5.24 tested).
"""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vgen.models import gemma3
from vgen.models.tokenizer import TextEncoderError, TextTokenizer, Tokens, read_tokenizer, special_id

if TYPE_CHECKING:
    import tokenizers

MAX_TOKENS = 512
"""Tokens per prompt, padding included. The transformer attends to all of them, so another number is another result."""


def build_text_encoder(config: Mapping[str, Any]) -> nn.Module:
    """The encoder of ``UMT5EncoderModel`` of a ``config.json``, on the meta device; it has no buffers.

    Not the whole model, which holds the embeddings under a second name.

    Raises:
        TextEncoderError: the config is of another model type.
    """
    from transformers.models.umt5 import UMT5Config, UMT5EncoderModel

    kind = config.get("model_type")
    if kind != "umt5":
        raise TextEncoderError(
            f"the text encoder's config.json has model_type={kind!r}; Wan needs umt5: use the text_encoder of a Wan "
            f"folder (Wan-AI/Wan2.2-TI2V-5B-Diffusers) or google/umt5-xxl"
        )
    with torch.device("meta"):
        model: nn.Module = UMT5EncoderModel(UMT5Config(**config)).encoder
    return model.eval()


def encode_text(model: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Last hidden states [B, L, D] in the model's dtype, exactly zero where ``attention_mask`` is 0.

    ``input_ids`` and ``attention_mask`` (1 = valid) are int64 [B, L]. The transformer has no mask and attends to the
    zeros as well.
    """
    states: Tensor = model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    return states.masked_fill(attention_mask[..., None] == 0, 0)


def clean_prompt(prompt: str) -> str:
    """The prompt as Wan was trained to read it: mojibake, ligatures, curly quotes and wide forms made plain, HTML
    entities resolved (twice: ``&amp;quot;``), every run of white space one space.
    """
    import ftfy

    return " ".join(html.unescape(html.unescape(ftfy.fix_text(prompt))).split())


class Tokenizer(TextTokenizer):
    """Turns prompts into UMT5's tokens the way Wan was trained: cleaned, EOS last, padded on the right."""

    def __init__(self, backend: "tokenizers.Tokenizer", eos_id: int, pad_id: int) -> None:
        super().__init__(backend, pad_id)
        self.eos_id = eos_id

    def clean(self, prompt: str) -> str:
        return clean_prompt(prompt)

    def tokenize(self, prompts: Sequence[str], max_length: int = MAX_TOKENS) -> Tokens:
        """Tokens of each prompt, right-padded to ``max_length``.

        A prompt with more tokens loses its end, not its EOS; ``dropped`` says how many tokens, so that the caller can
        warn.
        """
        ids = torch.full((len(prompts), max_length), self.pad_id, dtype=torch.int64)
        mask = torch.zeros((len(prompts), max_length), dtype=torch.int64)
        dropped = []
        for row, prompt in enumerate(prompts):
            tokens = self.backend.encode(clean_prompt(prompt), add_special_tokens=False).ids
            kept = [*tokens[: max_length - 1], self.eos_id]
            ids[row, : len(kept)] = torch.tensor(kept)
            mask[row, : len(kept)] = 1
            dropped.append(len(tokens) + 1 - len(kept))
        return Tokens(ids, mask, tuple(dropped))


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of ``folder``: ``tokenizer.json``, and its special tokens by name from ``tokenizer_config.json``.

    Raises:
        TextEncoderError: a file is missing or unreadable, or there is no end-of-sequence or padding token.
    """
    path = Path(folder) / "tokenizer.json"
    backend, names = read_tokenizer(path, "the tokenizer folder of a Wan checkpoint or google/umt5-xxl")
    ids = {}
    for key, default, use in (
        ("eos_token", "</s>", "end-of-sequence token, with which every prompt ends"),
        ("pad_token", "<pad>", "padding token, which fills a prompt up"),
    ):
        found = special_id(backend, names.get(key) or default)
        if found is None:
            raise TextEncoderError(f"{path} has no {use}; use UMT5's (google/umt5-xxl)")
        ids[key] = found
    return Tokenizer(backend, eos_id=ids["eos_token"], pad_id=ids["pad_token"])


def byte_tokenizer() -> Tokenizer:
    """One token per UTF-8 byte, ids below 512, special ids as UMT5's: for random weights, so nothing is downloaded."""
    backend = gemma3.byte_tokenizer().backend
    vocab = backend.get_vocab()
    return Tokenizer(backend, eos_id=vocab["<eos>"], pad_id=vocab["<pad>"])
