"""Captions as tokens: words that become unknown, and nothing else."""

import pytest
import torch

from vgen.tiny.tokenizer import GEMMA, UMT5, TextFormat, build_tokenizer
from vgen.tiny.training import captions

BOTH = pytest.mark.parametrize("text_format", [GEMMA, UMT5], ids=["gemma", "umt5"])
TEXTS = ["a red circle moves right, high tone", "", "an orange square", "a cat moves right"]


def drawn(
    rows: list[bool], rate: float, seed: int = 0, repeats: int = 1, text_format: TextFormat = GEMMA
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids before and after."""
    ids, mask = captions.text_tokens(TEXTS * repeats, 16, text_format)
    generator = torch.Generator().manual_seed(seed)
    kept = ids.clone(), mask.clone()
    made, made_mask = captions.with_unknown((ids, mask), text_format, torch.tensor(rows * repeats), rate, generator)
    assert torch.equal(ids, kept[0]) and torch.equal(made_mask, kept[1]) and made.dtype == ids.dtype
    return ids, made


@BOTH
def test_text_tokens_are_those_of_each_text(text_format: TextFormat) -> None:
    ids, mask = captions.text_tokens(TEXTS, 16, text_format)
    tokenizer = build_tokenizer(text_format)
    for text, row, valid in zip(TEXTS, ids.tolist(), mask.tolist(), strict=True):
        true = tokenizer.encode(text).ids
        padding = [text_format.pad_id] * (16 - len(true))
        assert row == (padding + true if text_format is GEMMA else true + padding) and sum(valid) == len(true)
    unknown = text_format.unknown_id
    assert text_format.special_tokens[unknown] == "<unk>" and ids[3].tolist().count(unknown) == 1
    one_ids, one_mask = captions.one_text(TEXTS[2], 16, text_format)
    assert (one_ids.dtype, one_mask.dtype) == (torch.int32, torch.bool)
    assert torch.equal(one_ids.long(), ids[2]) and torch.equal(one_mask.long(), mask[2])


@BOTH
def test_all_words_of_the_chosen_rows_become_unknown_and_special_tokens_stay(text_format: TextFormat) -> None:
    ids, made = drawn([True, True, False, True], rate=1.0, text_format=text_format)
    special = ids < len(text_format.special_tokens)
    assert torch.equal(made[special], ids[special]) and torch.equal(made[2], ids[2])
    chosen = [0, 1, 3]
    assert (made[chosen][~special[chosen]] == text_format.unknown_id).all()
    assert int((made != ids).sum()) == 8 + 3, "eight words and marks of the first, three known ones of the last"


def test_at_rate_0_no_word_becomes_unknown() -> None:
    ids, made = drawn([True] * 4, rate=0.0)
    assert torch.equal(ids, made)


def test_each_word_is_drawn_for_itself_at_the_rate() -> None:
    ids, made = drawn([True, False, True, False], rate=0.2, repeats=500)
    words = (ids >= len(GEMMA.special_tokens)) & torch.tensor([True, False, True, False] * 500)[:, None]
    changed = made != ids
    assert not (changed & ~words).any()
    # 5500 draws: a deviation of 0.0054.
    assert abs(float(changed[words].float().mean()) - 0.2) < 0.022
    whole = changed[0::4].sum(dim=1)
    assert whole.unique().numel() > 3, "not whole captions"
    per_place = changed[0::4][:, -8:].float().mean(dim=0)
    assert ((per_place - 0.2).abs() < 0.08).all()


def test_the_draw_is_the_generators() -> None:
    (_, first), (_, again), (_, other) = (drawn([True] * 4, 0.5, seed, repeats=8) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
