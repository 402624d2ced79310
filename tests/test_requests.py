"""Prompts files: text, JSONL, and their faults."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from vgen.config import ImageConfig, RequestConfig
from vgen.requests import build_requests, from_mapping
from vgen.typed import ConfigurationError

CONFIG = RequestConfig(
    prompt="p", negative_prompt="n", prompts_file=None, image=None, images=(), image_crf=33, video=None,
    noise_level=0.7, audio="generate", sound=None, seed=1, height=64, width=96, num_frames=9, fps=24.0,
)  # fmt: skip


def _from_file(tmp_path: Path, name: str, text: str) -> tuple[object, ...]:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return build_requests(dataclasses.replace(CONFIG, prompts_file=str(path)))


def test_single_request_takes_the_settings() -> None:
    (request,) = build_requests(CONFIG)
    assert dataclasses.asdict(request) == {
        "index": 0, "prompt": "p", "negative_prompt": "n", "images": (), "image_crf": 33, "video": None,
        "noise_level": 0.7, "audio": "generate", "sound": None, "seed": 1, "height": 64, "width": 96, "num_frames": 9,
        "fps": 24.0,
    }  # fmt: skip


def test_image_is_short_for_the_first_frame() -> None:
    other = ImageConfig("/b.png", frame=8, strength=0.5)
    (request,) = build_requests(dataclasses.replace(CONFIG, image="/a.png", images=(other,)))
    assert request.images == (ImageConfig("/a.png", 0, 1.0), other)


def test_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (request,) = build_requests(dataclasses.replace(CONFIG, image="a.png", video="v.mp4", sound="~/s.wav"))
    assert request.images[0].path == str(tmp_path / "a.png")
    assert request.video == str(tmp_path / "v.mp4")
    assert request.sound == str(Path("~/s.wav").expanduser())


def test_a_request_survives_json() -> None:
    (request,) = build_requests(dataclasses.replace(CONFIG, image="/a.png", video="/v.mp4"))
    assert from_mapping(json.loads(json.dumps(dataclasses.asdict(request)))) == request


@pytest.mark.parametrize(
    ("audio", "sound", "video", "has_audio", "source"),
    [
        ("generate", None, None, True, None),
        ("generate", None, "/v.mp4", True, "/v.mp4"),
        ("copy", "/s.wav", "/v.mp4", True, "/s.wav"),
        ("none", "/s.wav", "/v.mp4", False, None),
    ],
)
def test_where_the_sound_comes_from(
    audio: Any, sound: str | None, video: str | None, has_audio: bool, source: str | None
) -> None:
    (request,) = build_requests(dataclasses.replace(CONFIG, audio=audio, sound=sound, video=video))
    assert (request.has_audio, request.sound_source) == (has_audio, source)


def test_text_file_has_one_prompt_per_line(tmp_path: Path) -> None:
    requests = _from_file(tmp_path, "p.txt", 'a, {b} = "c"\n\n  \n日本語\u2028 same line\r\n${x}')
    assert [r.prompt for r in requests] == ['a, {b} = "c"', "日本語\u2028 same line", "${x}"]  # type: ignore[attr-defined]
    assert [r.index for r in requests] == [0, 1, 2]  # type: ignore[attr-defined]


def test_jsonl_overrides_single_fields(tmp_path: Path) -> None:
    text = '{"prompt": "a\\nb", "seed": 9, "audio": "none", "image": "/x.png"}\n{"prompt": "c", "fps": 30}\n'
    first, second = _from_file(tmp_path, "p.jsonl", text)
    assert (first.prompt, first.seed, first.audio, first.fps) == ("a\nb", 9, "none", 24.0)  # type: ignore[attr-defined]
    assert first.images == (ImageConfig("/x.png"),)  # type: ignore[attr-defined]
    assert (second.seed, second.fps) == (1, 30.0)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("p.txt", "\n \n", "has no prompt"),
        ("p.jsonl", "{", "line 1: the line is not JSON"),
        ("p.jsonl", f'{{"prompt": "a", "seed": {"1" * 5000}}}', "line 1: the line is not JSON"),
        ("p.jsonl", "[" * 100_000, "line 1: the line is not JSON"),
        ("p.jsonl", '{"prompt": "a"}\n{"seed": 1}', "line 2: the line has no prompt"),
        ("p.jsonl", '{"prompt": "a", "sede": 1}', "sets 'sede'"),
        ("p.jsonl", '{"prompt": "a", "seed": "x"}', "seed='x' is not a whole number"),
        ("p.jsonl", '{"prompt": "a", "index": 4}', "sets 'index'"),
        (
            "p.jsonl",
            '{"prompt": "a"}\n{"prompt": "a", "height": "x"}',
            "line 2: request.height='x' is not a whole number",
        ),
        ("p.jsonl", '{"prompt": "a", "audio": "loud"}', "use one of: generate, copy, none"),
        ("p.jsonl", '{"prompt": "a", "images": [{"frame": 3}]}', r"request.images\[0\].path is not set"),
    ],
)
def test_faults_are_named(tmp_path: Path, name: str, text: str, part: str) -> None:
    with pytest.raises(ConfigurationError, match=part):
        _from_file(tmp_path, name, text)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ('{"prompt": "a", "images": null}', "request.images=None is not a list; give request.images=[a,b]"),
        ('{"prompt": "a", "images": 5}', "request.images=5 is not a list; give request.images=[a,b]"),
        ('{"prompt": "a", "images": "a.png"}', "request.images='a.png' is not a list; give request.images=[a,b]"),
        ('{"prompt": "a", "images": [5]}', "request.images[0]=5 is not a group of settings; give key: value"),
        ('{"prompt": null}', "request.prompt=None is not text, and this setting takes nothing else"),
        ('{"prompt": "a", "fps": "x"}', "request.fps='x' is not a number, and this setting takes nothing else"),
        ('{"prompt": "a", "audio": "x"}', "request.audio='x' is not a choice; use one of: generate, copy, none"),
        ("[1]", 'the line has no prompt; write {"prompt": "…"}'),
    ],
)
def test_a_faulty_line_is_named_by_file_and_number(tmp_path: Path, entry: str, says: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        _from_file(tmp_path, "p.jsonl", f'{{"prompt": "a"}}\n\n{entry}\n{{"prompt": 1}}')
    assert str(raised.value) == f"request.prompts_file={tmp_path / 'p.jsonl'} line 3: {says}"


def test_a_line_without_images_keeps_those_of_the_settings(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b", "images": [{"path": "/b.png", "frame": 8}]}')
    images = (ImageConfig("/a.png", strength=0.5),)
    first, second = build_requests(dataclasses.replace(CONFIG, prompts_file=str(path), images=images))
    assert (first.images, second.images) == (images, (ImageConfig("/b.png", 8),))


def test_a_path_may_begin_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.txt").write_text("a")
    (request,) = build_requests(dataclasses.replace(CONFIG, prompts_file="~/p.txt", image="~nobody.png"))
    assert (request.prompt, request.images) == ("a", (ImageConfig(str(tmp_path / "~nobody.png")),))


def test_missing_file_is_named() -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        build_requests(dataclasses.replace(CONFIG, prompts_file="/nowhere/p.txt"))
