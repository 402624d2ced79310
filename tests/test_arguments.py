"""Prompts and paths on the command line come through Hydra's grammar unchanged."""

import random
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException
from omegaconf import OmegaConf

from vgen.app import explain
from vgen.arguments import is_quoted, prepare


def _through_hydra(arguments: list[str]) -> Any:
    override = OverridesParser.create().parse_override(arguments[0])
    assert not override.is_sweep_override()
    config = OmegaConf.create({"models": "/models"})
    OmegaConf.update(config, override.key_or_group, override.value())
    value = OmegaConf.to_container(config, resolve=True)
    for part in override.key_or_group.split("."):
        assert isinstance(value, dict)
        value = value[part]
    return value


PROMPTS = [
    "a, b", "it's", 'say "go"', "'a' and 'b'", "{a: b}", "[1, 2]", "x=y", "a\nb", "日本、語 🦊", "true", "12", "1e5",
    " lead", "trail ", "$", "${x}", "\\${x}", "$${x}", "${", "ends\\", "\\", "a\\'b", "#hash", "tab\t", "a:b", "(x)",
    "~", "*", "\\n", "ends\\\n", "café — ©", "עברית", "%",
]  # fmt: skip


@pytest.mark.parametrize("prompt", PROMPTS)
def test_any_prompt_survives(prompt: str) -> None:
    assert _through_hydra(prepare([f"request.prompt={prompt}"])) == prompt


PATHS = (
    "request.prompts_file", "request.image", "request.video", "request.sound", "model.checkpoint",
    "model.text_encoder.checkpoint", "task.latents",
)  # fmt: skip
FILES = [
    "my pic (1).png", "x,y.png", "it's.png", "a=b.png", "~/a.png", "[1].png", "{a}.png", "C:\\a b\\", "12", "true",
    " a", 'a "b".png', "日本.png", "a\\'b", "#1.png", "$x.png",
]  # fmt: skip


@pytest.mark.parametrize("key", PATHS)
def test_any_path_survives(key: str) -> None:
    for file in FILES:
        assert _through_hydra(prepare([f"{key}={file}"])) == file
        assert prepare([f"++{key}={file}"]) == ["++" + argument for argument in prepare([f"{key}={file}"])]
    assert _through_hydra(prepare([f"{key}='a, b.png'"])) == "a, b.png"


@pytest.mark.parametrize("key", PATHS)
def test_a_path_may_be_null_and_keeps_its_interpolations(key: str) -> None:
    assert _through_hydra(prepare([f"{key}=null"])) is None
    assert _through_hydra(prepare([f"{key}='null'"])) == "null"
    assert _through_hydra(prepare([f"{key}=${{models}}/it's (1).safetensors"])) == "/models/it's (1).safetensors"


@pytest.mark.parametrize("prompt", PROMPTS)
def test_any_negative_prompt_survives(prompt: str) -> None:
    assert _through_hydra(prepare([f"request.negative_prompt={prompt}"])) == prompt


def test_random_prompts_survive() -> None:
    generator = random.Random(0)
    for _ in range(1500):
        prompt = "".join(generator.choice("ab'\"\\${},=[]() :\n#\t?") for _ in range(generator.randint(1, 9)))
        if not is_quoted(prompt):
            assert _through_hydra(prepare([f"request.prompt={prompt}"])) == prompt


def test_a_quoted_prompt_is_taken_without_its_quotes() -> None:
    assert _through_hydra(prepare(["request.prompt='a, b'"])) == "a, b"
    assert _through_hydra(prepare(['request.prompt="a ${x}"'])) == "a ${x}"


def test_a_sweep_keeps_hydras_choices_and_protects_interpolation() -> None:
    arguments = prepare(["-m", "request.prompt='a, b ${x}','c'"])
    override = OverridesParser.create().parse_override(arguments[1])
    assert override.is_sweep_override()
    assert len(list(override.sweep_string_iterator())) == 2


@pytest.mark.parametrize("sign", ["-m", "--multirun", "hydra.mode=MULTIRUN"])
def test_a_sweep_over_paths_is_left_alone(sign: str) -> None:
    arguments = [sign, "request.image=a.png,null,'b, c.png'", "model.checkpoint=${models}/a", "task.latents=glob(*)"]
    assert prepare(arguments) == arguments


@pytest.mark.parametrize(
    "argument",
    ["hydra.run.dir=my runs (1)", "request.audio=a=b", "logger.project=a(b", "request.seed=x)", "request.seed='a"],
)
def test_what_hydra_cannot_read_is_told_with_the_argument(argument: str) -> None:
    with pytest.raises(OverrideParseException) as raised:
        OverridesParser.create().parse_overrides(prepare([argument]))
    expected = f"the argument {argument} cannot be read; put text with spaces or signs in inner quotes: 'key=\"…\"'"
    assert explain(raised.value) == expected


def test_other_arguments_and_null_are_left_alone() -> None:
    arguments = ["request.seed=1", "--cfg", "job", "request.negative_prompt=null", "request.prompt=", "model=ltx2"]
    assert prepare(arguments) == arguments
