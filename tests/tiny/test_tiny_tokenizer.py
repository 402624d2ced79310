"""The tokenizers: Gemma's and UMT5's special ids, one token per word, and the words that they do not know by name."""

import json
import random
from pathlib import Path

import pytest

from vgen.models.gemma3 import Tokenizer, load_tokenizer
from vgen.models.wan import text as umt5
from vgen.tiny.grammar import caption, captions, sample_scene, split_words, vocabulary
from vgen.tiny.tokenizer import GEMMA, UMT5, build_tokenizer, save_tokenizer

BOS = 2
TOKENIZER = Tokenizer(build_tokenizer(GEMMA), bos_id=BOS, pad_id=0)


def ids(text: str) -> list[int]:
    known: list[int] = build_tokenizer(GEMMA).encode(text, add_special_tokens=False).ids
    return known


def test_special_tokens_have_gemmas_ids_and_words_follow() -> None:
    tokenizer = build_tokenizer(GEMMA)
    assert [tokenizer.id_to_token(index) for index in range(4)] == ["<pad>", "<eos>", "<bos>", "<unk>"]
    assert [tokenizer.token_to_id(word) for word in vocabulary()] == list(range(4, 4 + len(vocabulary())))
    assert tokenizer.get_vocab_size() == 4 + len(vocabulary())


def test_every_caption_is_known_word_by_word() -> None:
    tokenizer = build_tokenizer(GEMMA)
    for index in range(300):
        scene = sample_scene(0, index, "heldout")
        for text in (*captions(scene), caption(scene, random.Random(index))):
            assert tokenizer.encode(text, add_special_tokens=False).tokens == split_words(text)
            assert TOKENIZER.unknown_words(text) == ()


@pytest.mark.parametrize(
    ("typed", "known"),
    [
        ("A Red CIRCLE moves right,high tone", "a red circle moves right, high tone"),
        ("a red circle moves right!", "a red circle moves right."),
        ("a red circle moves right; high tone", "a red circle moves right, high tone"),
        ("“a red circle” moves  (right)\n", "a red circle moves right"),
        ("a red-circle", "a red circle"),
    ],
)
def test_marks_and_capitals_make_no_difference(typed, known) -> None:
    assert ids(typed) == ids(known)
    assert TOKENIZER.unknown_words(typed) == ()


def test_unknown_words_are_named_as_typed_once_and_in_order() -> None:
    prompt = "A Purple circle, moves like an Éléphant - purple with a Purple tone & ß"
    assert TOKENIZER.unknown_words(prompt) == ("Purple", "like", "Éléphant", "purple", "&", "ß")
    assert ids("a purple circle") == [*ids("a"), 3, *ids("circle")]
    assert TOKENIZER.unknown_words("") == ()


def test_the_known_words_are_those_of_the_grammar() -> None:
    assert TOKENIZER.known_words() == tuple(word for word in vocabulary() if word not in (",", "."))


def test_the_saved_folder_reads_as_gemmas(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "tokenizer", GEMMA)
    tokens = load_tokenizer(tmp_path / "tokenizer").tokenize(["a red circle", "a purple circle moves up"], max_length=8)
    word = build_tokenizer(GEMMA).token_to_id
    assert tokens.input_ids.tolist() == [
        [0, 0, 0, 0, BOS, word("a"), word("red"), word("circle")],
        [0, 0, BOS, word("a"), 3, word("circle"), word("moves"), word("up")],
    ]
    assert tokens.attention_mask.tolist() == [[0] * 4 + [1] * 4, [0] * 2 + [1] * 6]
    assert tokens.dropped == (0, 0)


def test_saving_twice_writes_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_tokenizer(tmp_path / name, GEMMA)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    config = json.loads((tmp_path / "one" / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert {config[f"{name}_token"] for name in ("pad", "eos", "bos", "unk")} == set(GEMMA.special_tokens)


def test_transformers_reads_it_alike(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    save_tokenizer(tmp_path, GEMMA)
    theirs = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    prompts = ["a red circle", "a purple circle moves up, high tone"]
    encoded = theirs(prompts, padding="max_length", max_length=12, return_tensors="pt")
    ours = load_tokenizer(tmp_path).tokenize(prompts, max_length=12)
    assert encoded["input_ids"].tolist() == ours.input_ids.tolist()
    assert encoded["attention_mask"].tolist() == ours.attention_mask.tolist()
    assert theirs.decode(encoded["input_ids"][0], skip_special_tokens=True) == "a red circle"
    assert theirs.decode(theirs("the circle moves up, low tone.")["input_ids"][1:]) == "the circle moves up, low tone."


def test_umt5s_special_tokens_have_its_ids_and_words_follow() -> None:
    tokenizer = build_tokenizer(UMT5)
    assert [tokenizer.id_to_token(index) for index in range(3)] == ["<pad>", "</s>", "<unk>"]
    assert [tokenizer.token_to_id(word) for word in vocabulary()] == list(range(3, 3 + len(vocabulary())))


def test_wan_and_transformers_read_the_saved_folder_of_umt5s_format(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    save_tokenizer(tmp_path, UMT5)
    ours, theirs = umt5.load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    prompts = ["a red circle", "a purple  circle moves up; high tone", ""]
    tokens = ours.tokenize(prompts, max_length=10)
    word = build_tokenizer(UMT5).token_to_id
    words = ("a", "<unk>", "circle", "moves", "up", ",", "high", "tone")
    assert tokens.input_ids.tolist() == [
        [*map(word, ("a", "red", "circle")), 1, *[0] * 6], [*map(word, words), 1, 0], [1, *[0] * 9],
    ]  # fmt: skip
    encoded = theirs(prompts, padding="max_length", max_length=10, truncation=True, return_tensors="pt")
    assert encoded["input_ids"].tolist() == tokens.input_ids.tolist()
    assert encoded["attention_mask"].tolist() == tokens.attention_mask.tolist()
    assert ours.unknown_words(prompts[1]) == ("purple",)
