"""Wan's text encoder: cleaning, tokens and embeddings against diffusers' pipeline over the same folder."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from diffusers import WanPipeline
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from tokenizers import models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import AutoTokenizer, UMT5Config, UMT5EncoderModel

from vgen.models.gemma3 import TextEncoderError
from vgen.models.names import owners, rename
from vgen.models.wan import keys
from vgen.models.wan.encoder_configs import UMT5_XXL
from vgen.models.wan.text import (
    MAX_TOKENS,
    Tokenizer,
    build_text_encoder,
    byte_tokenizer,
    clean_prompt,
    encode_text,
    load_tokenizer,
)
from vgen.random_weights import fill_random

PROMPTS = ["  A red fox’s walk,\n &amp;quot;through&quot;  deep ｓｎｏｗ… ", "snow", "", "a fox " * 400]
_WORDS = ("red", "fox", "walk", "snow", "deep", "through", "quot", "amp")
SPECIAL = ("<pad>", "</s>", "<unk>")


def tiny_umt5() -> dict[str, Any]:
    """Sizes that cannot be swapped, more positions than buckets, heads that are not ``d_model`` wide together."""
    return dict(UMT5_XXL) | {"vocab_size": 160, "d_model": 48, "d_kv": 8, "d_ff": 80, "num_heads": 4, "num_layers": 3}


def write_tokenizer(folder: Path, config: Mapping[str, Any] | None = None) -> Path:
    """A Unigram tokenizer of the kind of T5's, with settings for another use."""
    pieces = ["▁", *(f"▁{word}" for word in _WORDS), *_WORDS, *map(chr, range(33, 127))]
    vocab = [(special, 0.0) for special in SPECIAL] + [(piece, -1.0 / len(piece)) for piece in dict.fromkeys(pieces)]
    backend = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=2, byte_fallback=False))
    backend.add_special_tokens(list(SPECIAL))
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    backend.enable_truncation(3)
    backend.enable_padding(length=7)
    backend.save(str(folder / "tokenizer.json"))
    defaults = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(defaults if config is None else config))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@cache
def reference() -> Any:
    """transformers' model with random weights, norms and biases of every layer among them."""
    model: Any = UMT5EncoderModel(UMT5Config(**tiny_umt5())).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3 + (parameter.ndim == 1)
    return model


def load(tensors: Mapping[str, Tensor]) -> nn.Module:
    """Our encoder with the tensors of a diffusers folder."""
    model = build_text_encoder(tiny_umt5())
    layouts = {"text_encoder": keys.TRANSFORMERS["text_encoder"]}
    ignored = keys.text_encoder_ignored(tensors)
    prefixes = {name: owners(name, layouts)["text_encoder"] for name in tensors if not name.startswith(ignored)}
    ours = {rename(name, layouts["text_encoder"], prefix): tensors[name] for name, prefix in prefixes.items()}
    model.load_state_dict(ours, assign=True)
    return model


@torch.no_grad()
def embeddings_of_diffusers(folder: Path, prompts: list[str], dtype: torch.dtype) -> Tensor:
    pipeline = WanPipeline(
        tokenizer=AutoTokenizer.from_pretrained(folder),
        text_encoder=reference().to(dtype),
        vae=None,
        scheduler=None,
    )
    embeddings, none = pipeline.encode_prompt(
        prompts, do_classifier_free_guidance=False, max_sequence_length=512, device=torch.device("cpu")
    )
    assert none is None
    return embeddings  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_embeddings_are_those_of_diffusers(folder: Path, dtype: torch.dtype) -> None:
    theirs = embeddings_of_diffusers(folder, PROMPTS, dtype)
    model = load(reference().to(dtype).state_dict())
    tokens = load_tokenizer(folder).tokenize(PROMPTS)
    with torch.no_grad():
        ours = encode_text(model, tokens.input_ids, tokens.attention_mask)
    assert ours.shape == (len(PROMPTS), 512, 48)
    assert ours.dtype == dtype
    assert ours.equal(theirs)
    assert ours[1, :3].abs().amin(-1).gt(0).any()


def test_places_after_a_prompt_are_exactly_zero_and_change_nothing(folder: Path) -> None:
    model, tokens = load(reference().float().state_dict()), load_tokenizer(folder).tokenize(PROMPTS, 24)
    other = torch.where(tokens.attention_mask == 0, 9, tokens.input_ids)
    with torch.no_grad():
        ours = encode_text(model, tokens.input_ids, tokens.attention_mask)
        theirs = encode_text(model, other, tokens.attention_mask)
    padding = tokens.attention_mask == 0
    assert padding.sum(1).tolist()[1:] == [22, 23, 0]
    assert (ours[padding] == 0).all()
    assert (ours[~padding] != 0).all()
    assert ours.equal(theirs)


@pytest.mark.parametrize("max_length", [2, 24, MAX_TOKENS])
@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "T5TokenizerFast"])
def test_tokens_are_those_of_transformers(tmp_path: Path, kind: str, max_length: int) -> None:
    write_tokenizer(tmp_path, {"tokenizer_class": kind, "pad_token": "<pad>", "eos_token": "</s>"})
    # transformers' T5 class makes a backend of its own, and of the file's normalizer it keeps SentencePiece's only.
    prompts = [prompt.replace("…", ".") for prompt in PROMPTS]
    theirs = AutoTokenizer.from_pretrained(tmp_path)(
        [prompt_clean(prompt) for prompt in prompts],
        padding="max_length",
        max_length=max_length,
        truncation=True,
        return_tensors="pt",
    )
    ours = load_tokenizer(tmp_path).tokenize(prompts, max_length)
    assert ours.input_ids.dtype == ours.attention_mask.dtype == torch.int64
    assert ours.input_ids.equal(theirs.input_ids)
    assert ours.attention_mask.equal(theirs.attention_mask)
    assert ours.dropped[1:3] == (0, 0)
    assert ours.dropped[3] == 1201 - max_length


def test_prompts_are_cleaned_as_in_diffusers() -> None:
    blocks = (range(1, 0x400), range(0x1F00, 0x2200), range(0x3000, 0x3100), range(0xFB00, 0x10000))
    texts = [
        *PROMPTS,
        *(f"a{chr(code)}b" for block in blocks for code in block),
        "&lt;b&gt; &amp;lt;i&amp;gt; &#8217; &nbsp;x",
        "< &amp;quot;x&amp;quot;",  # ftfy leaves entities beside a tag to the other two passes
        "cafÃ© â€œquotedâ€\x9d",  # UTF-8 read as Windows-1252
        "过曝，静态",
    ]
    assert [clean_prompt(text) for text in texts] == [prompt_clean(text) for text in texts]


@pytest.mark.parametrize(
    ("prompt", "clean"),
    [
        ("“the fox’s” ﬁre", '"the fox\'s" fire'),
        ("cafÃ©", "café"),
        ("过曝，静态", "过曝,静态"),
        (" a\u3000\t b\u2028c ", "a b c"),
        ("&amp;quot;x&amp;quot;", '"x"'),
    ],
)
def test_a_clean_prompt(prompt: str, clean: str) -> None:
    """What the official code's own libraries make of it; without ftfy, every prompt but the last two would differ."""
    assert clean_prompt(prompt) == clean


def test_special_tokens_are_found_by_name(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, {"eos_token": {"content": "<unk>"}, "pad_token": "</s>"})
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.eos_id, tokenizer.pad_id) == (2, 1)
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.eos_id, tokenizer.pad_id) == (1, 0)


@pytest.mark.parametrize(
    ("config", "says"),
    [({"eos_token": "<absent>"}, "no end-of-sequence token"), ({"pad_token": {"content": "x?"}}, "no padding token")],
)
def test_a_tokenizer_without_its_special_tokens_is_refused(
    tmp_path: Path, config: Mapping[str, Any], says: str
) -> None:
    write_tokenizer(tmp_path, config)
    with pytest.raises(TextEncoderError, match=says):
        load_tokenizer(tmp_path)


def test_a_missing_or_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TextEncoderError, match="there is no"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TextEncoderError, match="is no readable tokenizer"):
        load_tokenizer(tmp_path)


def test_words_that_a_small_vocabulary_lacks_are_named_as_cleaned() -> None:
    vocab = {word: index for index, word in enumerate((*SPECIAL, "fox", "red", "."))}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = Tokenizer(backend, eos_id=1, pad_id=0)
    assert tokenizer.unknown_words("red “ｄｏｇ” fox  ｄｏｇ .") == ('"', "dog")
    assert tokenizer.known_words() == ("fox", "red")
    assert byte_tokenizer().unknown_words("dog") == ()


def test_random_weights_encode() -> None:
    model = build_text_encoder(tiny_umt5() | {"vocab_size": 512})
    fill_random(model, seed=0, device="cpu", dtype=torch.float32, prefix="text_encoder")
    tokens = byte_tokenizer().tokenize(["fox", "cat 雪"], 16)
    assert tokens.input_ids[0].tolist()[4:] == [0] * 12
    assert tokens.input_ids[:, (3, 7)].diagonal().tolist() == [1, 1]
    with torch.no_grad():
        states = encode_text(model, tokens.input_ids, tokens.attention_mask)
    assert states.isfinite().all()
    assert (states[0, 0] - states[1, 0]).abs().max() > 0.1


def test_the_full_size_is_umt5_xxl() -> None:
    model = build_text_encoder(UMT5_XXL)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not list(model.buffers())
    assert not model.training
    assert sum(parameter.numel() for parameter in model.parameters()) == 5_680_910_336
    biases = [name for name in model.state_dict() if name.endswith("relative_attention_bias.weight")]
    assert len(biases) == 24
    with pytest.raises(TypeError):
        UMT5_XXL["d_model"] = 1  # type: ignore[index]


def test_another_kind_of_text_encoder_is_refused() -> None:
    for config in ({"model_type": "t5"}, {}, {"model_type": "gemma3_text"}):
        with pytest.raises(TextEncoderError, match=r"model_type=.*; Wan needs umt5: use the text_encoder"):
            build_text_encoder(config)


def test_importing_the_modules_imports_neither_transformers_nor_ftfy() -> None:
    code = (
        "import sys, vgen.models.wan.text, vgen.models.wan.image_encoder; "
        "sys.exit(any(name in sys.modules for name in ('transformers', 'ftfy', 'tokenizers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, check=False).returncode == 0
