"""The tiny models' tokenizers: one token per word of the grammar, in Gemma's format and in UMT5's."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

from vgen.tiny.grammar import vocabulary


@dataclass(frozen=True)
class TextFormat:
    """How a text becomes tokens: ``special_tokens`` have the ids from 0 on, ``template`` adds some to the text's own.

    ``names``: which special token is which, in the words of ``tokenizer_config.json``.
    """

    special_tokens: tuple[str, ...]
    template: str
    padding_side: Literal["left", "right"]
    max_tokens: int
    names: tuple[tuple[str, str], ...]

    @property
    def pad_id(self) -> int:
        return self.special_tokens.index("<pad>")

    @property
    def unknown_id(self) -> int:
        return self.special_tokens.index("<unk>")


GEMMA = TextFormat(
    special_tokens=("<pad>", "<eos>", "<bos>", "<unk>"),
    template="<bos> $A",
    padding_side="left",
    max_tokens=1024,
    names=(("pad", "<pad>"), ("eos", "<eos>"), ("bos", "<bos>"), ("unk", "<unk>")),
)
UMT5 = TextFormat(
    special_tokens=("<pad>", "</s>", "<unk>"),
    template="$A </s>",
    padding_side="right",
    max_tokens=512,
    names=(("pad", "<pad>"), ("eos", "</s>"), ("unk", "<unk>")),
)


def build_tokenizer(text_format: TextFormat) -> tokenizers.Tokenizer:
    """Words in lower case and single marks, with ids in the grammar's order behind the special ones; else ``<unk>``."""
    special = text_format.special_tokens
    ids = {token: index for index, token in enumerate((*special, *vocabulary()))}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.add_special_tokens(list(special))
    # Marks that no caption has become one that means the same, or a gap: they are no unknown words.
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.Lowercase(),
            normalizers.Replace(Regex("[!?…]"), "."),
            normalizers.Replace(Regex("[;:–—]"), ","),
            normalizers.Replace(Regex("[-_/()\"'“”‘’]"), " "),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # between words and around each mark
    added = [part for part in text_format.template.split() if part != "$A"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=text_format.template, special_tokens=[(token, ids[token]) for token in added]
    )
    tokenizer.decoder = decoders.WordPiece(cleanup=True)  # spaces between words, none before marks
    return tokenizer


def save_tokenizer(folder: Path, text_format: TextFormat) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``, which the readers of Gemma-3 and of UMT5 read."""
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer(text_format).save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": text_format.max_tokens,
        "padding_side": text_format.padding_side,
        **{f"{name}_token": token for name, token in text_format.names},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
