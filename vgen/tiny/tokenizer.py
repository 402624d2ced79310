"""The tiny model's tokenizer: one token per word of the grammar, in Gemma's format."""

import json
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

from vgen.tiny.grammar import vocabulary

SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>")
"""Ids 0 to 3, as Gemma's."""

MAX_TOKENS = 1024


def build_tokenizer() -> tokenizers.Tokenizer:
    """Words in lower case and single marks, ids from 4 on in the grammar's order; anything else is ``<unk>``."""
    ids = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *vocabulary()))}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
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
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", ids["<bos>"])]
    )
    tokenizer.decoder = decoders.WordPiece(cleanup=True)  # spaces between words, none before marks
    return tokenizer


def save_tokenizer(folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``, which Gemma-3's readers read."""
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_TOKENS,
        "padding_side": "left",
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "bos_token": "<bos>",
        "unk_token": "<unk>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
