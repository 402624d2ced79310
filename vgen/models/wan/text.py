"""UMT5 as Wan's text encoder: the encoder of ``transformers``, the official cleaning and tokens, zeros after a prompt.

Shapes: B prompts, L tokens, D hidden size.
Source: Wan-Video/Wan2.1 at 9737cba, ``wan/modules/{t5,tokenizers}.py`` (the same in 2.2); the modules are those of
huggingface/transformers (5.17 and 5.24 tested).
"""

import html
import json
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from vgen.models import gemma3
from vgen.models.gemma3 import TextEncoderError

if TYPE_CHECKING:
    import tokenizers

MAX_TOKENS = 512
"""Tokens per prompt, padding included. The transformer attends to all of them, so another number is another result."""

UMT5_XXL: Mapping[str, Any] = MappingProxyType(
    {
        "model_type": "umt5",
        "vocab_size": 256384,
        "d_model": 4096,
        "d_kv": 64,
        "d_ff": 10240,
        "num_layers": 24,
        "num_heads": 64,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
        "layer_norm_epsilon": 1e-6,
        "feed_forward_proj": "gated-gelu",
        "dropout_rate": 0.1,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
)
"""``config.json`` of google/umt5-xxl, for random weights."""


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


class Tokens(NamedTuple):
    """Right-padded tokens of B prompts: int64 [B, L] each (mask: 1 = valid), and how many tokens each prompt lost."""

    input_ids: Tensor
    attention_mask: Tensor
    dropped: tuple[int, ...]


class Tokenizer:
    """Turns prompts into UMT5's tokens the way Wan was trained: cleaned, EOS last, padded on the right."""

    def __init__(self, backend: "tokenizers.Tokenizer", eos_id: int, pad_id: int) -> None:
        self.backend = backend
        self.eos_id = eos_id
        self.pad_id = pad_id
        # UMT5's own has one too, but nothing becomes it: its byte tokens spell what has no other.
        unknown = getattr(backend.model, "unk_token", None)
        self.unknown_id = None if unknown is None else backend.token_to_id(unknown)
        # A tokenizer.json may bring settings for another use.
        self.backend.no_truncation()
        self.backend.no_padding()

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

    def unknown_words(self, prompt: str) -> tuple[str, ...]:
        """The parts of a cleaned prompt that become the unknown token, each once, in order."""
        prompt = clean_prompt(prompt)
        encoding = self.backend.encode(prompt, add_special_tokens=False)
        pieces = zip(encoding.ids, encoding.offsets, strict=True)
        return tuple(dict.fromkeys(prompt[start:end] for token, (start, end) in pieces if token == self.unknown_id))

    def known_words(self) -> tuple[str, ...]:
        """Tokens that are whole words of letters, in the order of their ids."""
        return tuple(word for word, _ in sorted(self.backend.get_vocab().items(), key=itemgetter(1)) if word.isalpha())


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of ``folder``: ``tokenizer.json``, and its special tokens by name from ``tokenizer_config.json``.

    Raises:
        TextEncoderError: a file is missing or unreadable, or there is no end-of-sequence or padding token.
    """
    import tokenizers

    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise TextEncoderError(f"there is no {path}; give the tokenizer folder of a Wan checkpoint or google/umt5-xxl")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust library raises plain Exception
        raise TextEncoderError(f"{path} is no readable tokenizer ({error}); download it again") from error
    config_path = path.with_name("tokenizer_config.json")
    names = json.loads(config_path.read_text(encoding="utf-8")) if config_path.is_file() else {}
    ids = {}
    for key, default, use in (
        ("eos_token", "</s>", "end-of-sequence token, with which every prompt ends"),
        ("pad_token", "<pad>", "padding token, which fills a prompt up"),
    ):
        token = names.get(key) or default
        found = backend.token_to_id(token["content"] if isinstance(token, Mapping) else token)
        if found is None:
            raise TextEncoderError(f"{path} has no {use}; use UMT5's (google/umt5-xxl)")
        ids[key] = found
    return Tokenizer(backend, eos_id=ids["eos_token"], pad_id=ids["pad_token"])


def byte_tokenizer() -> Tokenizer:
    """One token per UTF-8 byte, ids below 512, special ids as UMT5's: for random weights, so nothing is downloaded."""
    backend = gemma3.byte_tokenizer().backend
    vocab = backend.get_vocab()
    return Tokenizer(backend, eos_id=vocab["<eos>"], pad_id=vocab["<pad>"])
