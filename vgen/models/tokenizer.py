"""What the tokenizers of all text encoders share: reading a ``tokenizer.json``, and the words that it does not know."""

import json
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    import tokenizers


class TextEncoderError(ValueError):
    """A text encoder's config or tokenizer is not the one that the model needs."""


class Tokens(NamedTuple):
    """Padded tokens of B prompts: int64 [B, L] each (mask: 1 = valid), and how many tokens each prompt lost."""

    input_ids: Tensor
    attention_mask: Tensor
    dropped: tuple[int, ...]


class TextTokenizer:
    """A tokenizer without settings of its own; how a prompt becomes tokens is for each text encoder to say."""

    def __init__(self, backend: "tokenizers.Tokenizer", pad_id: int) -> None:
        self.backend = backend
        self.pad_id = pad_id
        # Gemma's and UMT5's have one too, but nothing becomes it: their byte tokens spell what has no other.
        unknown = getattr(backend.model, "unk_token", None)
        self.unknown_id = None if unknown is None else backend.token_to_id(unknown)
        # A tokenizer.json may bring settings for another use.
        self.backend.no_truncation()
        self.backend.no_padding()

    def clean(self, prompt: str) -> str:
        """The prompt as ``unknown_words`` reads it."""
        return prompt

    def unknown_words(self, prompt: str) -> tuple[str, ...]:
        """The parts of a cleaned prompt that become the unknown token, as they are written, each once, in order."""
        prompt = self.clean(prompt)
        encoding = self.backend.encode(prompt, add_special_tokens=False)
        pieces = zip(encoding.ids, encoding.offsets, strict=True)
        return tuple(dict.fromkeys(prompt[start:end] for token, (start, end) in pieces if token == self.unknown_id))

    def known_words(self) -> tuple[str, ...]:
        """Tokens that are whole words of letters, in the order of their ids."""
        return tuple(word for word, _ in sorted(self.backend.get_vocab().items(), key=itemgetter(1)) if word.isalpha())


def read_tokenizer(path: Path, give: str) -> tuple["tokenizers.Tokenizer", Mapping[str, Any]]:
    """``tokenizer.json`` at ``path``, and the ``tokenizer_config.json`` beside it, empty if there is none.

    Raises:
        TextEncoderError: it is missing (``give`` says what to give instead) or unreadable.
    """
    import tokenizers

    if not path.is_file():
        raise TextEncoderError(f"there is no {path}; give {give}")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust library raises plain Exception
        raise TextEncoderError(f"{path} is no readable tokenizer ({error}); download it again") from error
    config_path = path.with_name("tokenizer_config.json")
    return backend, json.loads(config_path.read_text(encoding="utf-8")) if config_path.is_file() else {}


def special_id(backend: "tokenizers.Tokenizer", token: Any) -> int | None:
    """Id of a special token as ``tokenizer_config.json`` gives it: its text, or an object that has it."""
    content = token.get("content") if isinstance(token, Mapping) else token
    return None if content is None else backend.token_to_id(content)
