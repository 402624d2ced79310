"""Prompts on the command line come through Hydra's grammar unchanged."""

import random

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from vgen.arguments import is_quoted, prepare


def _through_hydra(arguments: list[str]) -> str:
    override = OverridesParser.create().parse_override(arguments[0])
    config = OmegaConf.create({"request": {"prompt": "unset", "negative_prompt": "unset"}})
    OmegaConf.update(config, override.key_or_group, override.value())
    container = OmegaConf.to_container(config, resolve=True)
    assert isinstance(container, dict)
    value = container["request"]["prompt"]
    assert isinstance(value, str)
    return value


PROMPTS = [
    "a, b", "it's", 'say "go"', "'a' and 'b'", "{a: b}", "[1, 2]", "x=y", "a\nb", "日本、語 🦊", "true", "12", "1e5",
    " lead", "trail ", "$", "${x}", "\\${x}", "$${x}", "${", "ends\\", "\\", "a\\'b", "#hash", "tab\t", "a:b", "(x)",
    "~", "*", "\\n", "ends\\\n", "café — ©", "עברית", "%",
]  # fmt: skip


@pytest.mark.parametrize("prompt", PROMPTS)
def test_any_prompt_survives(prompt: str) -> None:
    assert _through_hydra(prepare([f"request.prompt={prompt}"])) == prompt


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


def test_other_arguments_and_null_are_left_alone() -> None:
    arguments = ["request.seed=1", "--cfg", "job", "request.negative_prompt=null", "request.prompt=", "model=ltx2"]
    assert prepare(arguments) == arguments
