"""What is said of a prompt that the text encoder does not get as it is written."""

import dataclasses
import logging
from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers import models, normalizers

from tests.pipelines.test_ltx2_pipeline import make_job
from vgen.components import ltx2
from vgen.models.gemma3 import Tokenizer
from vgen.stages.text import TextComponents, encode_prompts

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> TextComponents:
    """The text side of the default model."""
    return ltx2.build_text(make_job(tmp_path_factory.mktemp("job")), CPU)


def said(text: TextComponents, prompts: list[str], caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.INFO, "vgen.notice"):
        encode_prompts(dataclasses.replace(text, told=set()), prompts, CPU)
    return caplog.messages


def test_words_that_the_tokenizer_lacks_are_named_and_those_that_it_has(
    shipped: TextComponents, caplog: pytest.LogCaptureFixture
) -> None:
    (sentence,) = said(shipped, ["A Red cat moves right, running like a Cat!", ""], caplog)
    assert sentence.startswith("the model does not know 'cat', 'running', 'like', 'Cat' and hears an unknown word in")
    assert "; it knows: a, an, red, orange, " in sentence and "<pad>" not in sentence and "\n" not in sentence
    assert said(shipped, ["a red circle moves right, high tone", "A BLUE square - moving up!"], caplog) == []


def test_each_prompt_is_told_of_once(shipped: TextComponents, caplog: pytest.LogCaptureFixture) -> None:
    assert len(said(shipped, ["a cat", "rain", "a cat", "rain"], caplog)) == 2


def test_unknown_words_count_as_tokens_and_a_long_prompt_is_cut_aloud(
    shipped: TextComponents, caplog: pytest.LogCaptureFixture
) -> None:
    cut, whole = "a red circle moves right" + " cat" * 27, "a red circle moves right" + " cat" * 26
    unknown, dropped = said(shipped, [cut], caplog)
    assert unknown.startswith("the model does not know 'cat' and")
    assert dropped.startswith("the prompt is 1 tokens longer than the 32")
    assert len(said(shipped, [whole], caplog)) == 1
    one, other = encode_prompts(shipped, [cut, whole], CPU)
    assert torch.equal(one.video, other.video) and torch.equal(one.audio, other.audio)


def test_an_unknown_word_changes_what_the_model_hears(shipped: TextComponents) -> None:
    known, cat, dog = encode_prompts(shipped, ["a red circle", "a red cat", "a red dog"], CPU)
    assert torch.equal(cat.video, dog.video)
    assert not torch.equal(known.video, cat.video)


def byte_fallback() -> Tokenizer:
    """In the manner of Gemma's own: pieces, then bytes, and an unknown token that nothing becomes."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "r", "e", "d"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    return Tokenizer(backend, bos_id=2, pad_id=0)


def test_nothing_is_unknown_to_bytes() -> None:
    tokenizer = byte_fallback()
    assert tokenizer.unknown_id == 3
    assert len(tokenizer.backend.encode("é").ids) == 2
    assert tokenizer.unknown_words("a red Éléphant 🦊\n") == ()


def test_random_weights_read_bytes_and_know_all(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = ltx2.build_text(make_job(tmp_path, "model.weights=random"), CPU)
    assert text.tokenizer.unknown_id is None
    assert said(text, ["a cat 🦊"], caplog) == []
