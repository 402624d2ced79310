"""The grammar: splits that never mix, captions that parse back, a vocabulary that holds every word."""

import dataclasses
import random
from collections import Counter
from itertools import combinations, pairwise

import pytest

from vgen.tiny.grammar import (
    COLOURS,
    COMBINATIONS,
    HELD_OUT,
    MOTIONS,
    PITCHES_HZ,
    SHAPES,
    Scene,
    caption,
    captions,
    parse,
    sample_scene,
    split_words,
    vocabulary,
)

ATTRIBUTES = ("shape", "colour", "motion", "background", "pitch", "loudness")


def combination(scene: Scene) -> tuple[str, str, str]:
    return scene.colour, scene.shape, scene.motion


def test_every_pair_of_a_held_out_combination_is_left_in_training() -> None:
    trained = set(COMBINATIONS) - HELD_OUT
    assert len(HELD_OUT) == 40
    assert len(COMBINATIONS) == len(COLOURS) * len(SHAPES) * len(MOTIONS)
    for places in combinations(range(3), 2):
        pairs = {tuple(combination[place] for place in places) for combination in trained}
        missing = [one for one in HELD_OUT if tuple(one[place] for place in places) not in pairs]
        assert not missing
    for kept, most in (((0, 2), 1), ((0, 1), 2), ((1, 2), 2)):
        pairs = Counter(tuple(one[place] for place in kept) for one in HELD_OUT)
        assert max(pairs.values()) == most


@pytest.mark.parametrize("values", [COLOURS, SHAPES, MOTIONS])
def test_every_value_is_held_out_sometimes(values: tuple[str, ...]) -> None:
    place = [COLOURS, SHAPES, MOTIONS].index(values)
    assert {one[place] for one in HELD_OUT} == set(values)


def test_training_draws_every_combination_but_those_held_out() -> None:
    drawn = {combination(sample_scene(0, index, "train")) for index in range(3000)}
    assert drawn == set(COMBINATIONS) - HELD_OUT


def test_the_splits_for_evaluation_go_through_their_combinations_without_repeating() -> None:
    held_out = [combination(sample_scene(1, index, "heldout")) for index in range(40)]
    seen = [combination(sample_scene(1, index, "seen")) for index in range(152)]
    assert set(held_out) == HELD_OUT
    assert set(seen) == set(COMBINATIONS) - HELD_OUT
    assert combination(sample_scene(1, 40, "heldout")) == held_out[0]
    assert sample_scene(1, 40, "heldout") != sample_scene(1, 0, "heldout")


def test_a_scene_is_the_same_for_the_same_numbers_only() -> None:
    assert sample_scene(3, 7, "train") == sample_scene(3, 7, "train")
    others = [sample_scene(4, 7, "train"), sample_scene(3, 8, "train"), sample_scene(3, 7, "seen")]
    assert sample_scene(3, 7, "train").place not in [other.place for other in others]


def test_a_known_scene_stays_the_same_from_version_to_version() -> None:
    scene = sample_scene(0, 3, "train")
    assert combination(scene) == ("cyan", "square", "down left")
    assert scene.size == pytest.approx(0.1919680916892665, abs=1e-15)


@pytest.mark.parametrize("split", ["train", "seen", "heldout"])
def test_captions_parse_to_their_scene(split) -> None:
    for index in range(60):
        scene = sample_scene(5, index, split)
        for text in (*captions(scene), *(caption(scene, random.Random(turn)) for turn in range(40))):
            fixed = parse(text)
            assert {"shape", "colour", "motion"} <= set(fixed) <= set(ATTRIBUTES)
            assert fixed == {name: getattr(scene, name) for name in fixed}
            assert text == text.lower()
            assert "  " not in text


def test_captions_are_different_and_leave_sound_and_background_out_in_some() -> None:
    texts = captions(sample_scene(0, 0, "train"))
    assert len(set(texts)) == len(texts) >= 12
    named = [parse(text) for text in texts]
    for name in ("background", "pitch", "loudness"):
        assert 3 <= sum(name in fixed for fixed in named) <= len(texts) - 3


def test_the_first_captions_are_what_one_types() -> None:
    scene = dataclasses.replace(
        sample_scene(0, 0, "train"), colour="red", shape="circle", motion="right", pitch="high", loudness="loud"
    )
    assert captions(scene)[:2] == ("a red circle moves right", "a red circle moves right, high tone")
    assert combination(scene) not in HELD_OUT


def test_orange_takes_an() -> None:
    scenes = [sample_scene(0, index, "train") for index in range(200)]
    first = {scene.colour: captions(scene)[0].split()[0] for scene in scenes}
    assert first == {colour: "an" if colour == "orange" else "a" for colour in COLOURS}


def test_the_vocabulary_is_the_words_that_captions_use() -> None:
    used = set()
    for index in range(2000):
        used.update(split_words(caption(sample_scene(0, index, "train"), random.Random(index))))
    assert used == set(vocabulary())
    assert len(set(vocabulary())) == len(vocabulary()) <= 64


@pytest.mark.parametrize(
    ("text", "fixed"),
    [
        ("a red circle moves right, high tone", {"motion": "right", "pitch": "high"}),
        ("A Red CIRCLE moving to the Right!", {"motion": "right"}),
        (
            "red circle going to the right with a loud low tone on a striped background",
            {"motion": "right", "loudness": "loud", "pitch": "low", "background": "striped"},
        ),
        (
            "a red circle going left and up with a quiet medium sound",
            {"motion": "up left", "loudness": "soft", "pitch": "middle"},
        ),
        ("a red circle on a dark gray background", {"background": "grey"}),
        ("a red circle moves downwards and to the left", {"motion": "down left"}),
    ],
)
def test_free_wordings_parse_too(text, fixed) -> None:
    assert parse(text) == {"colour": "red", "shape": "circle", **fixed}


@pytest.mark.parametrize("text", ["a red blue circle", "a circle moves left and right", "a high low tone"])
def test_a_contradiction_is_refused(text) -> None:
    with pytest.raises(ValueError, match=r"names both .*keep one"):
        parse(text)


def test_a_caption_may_fix_nothing() -> None:
    assert parse("an elephant") == {}


def test_pitches_lie_well_apart() -> None:
    hertz = sorted(PITCHES_HZ.values())
    assert all(high / low >= 1.6 for low, high in pairwise(hertz))
    assert hertz[0] >= 200
    assert hertz[-1] <= 2000
