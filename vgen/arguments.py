"""Lets a prompt or a path on the command line be any text, without a second layer of quotes for Hydra's grammar."""

import re

_PROMPTS = ("request.prompt", "request.negative_prompt")
_PATHS = (
    "request.prompts_file", "request.image", "request.video", "request.sound", "model.checkpoint",
    "model.text_encoder.checkpoint", "task.latents",
)  # fmt: skip
_MULTIRUN = ("-m", "--multirun", "hydra.mode=MULTIRUN")


def prepare(arguments: list[str]) -> list[str]:
    """Quote prompts and paths for Hydra.

    On a single run the text after ``request.prompt=`` is the prompt, whatever it holds; only a value that already
    is one quoted string is left as it is. In a sweep Hydra's own rules hold, since a comma separates choices there;
    ``${`` is protected in both, so that a prompt is never taken for an interpolation. Paths are alike, but that they
    keep their interpolations: ``model.checkpoint=${oc.env:MODELS}/ltx-2-19b-dev.safetensors``.
    """
    sweep = any(argument in _MULTIRUN for argument in arguments)
    return [_prepare_one(argument, sweep) for argument in arguments]


def _prepare_one(argument: str, sweep: bool) -> str:
    key, _, text = argument.partition("=")
    setting = re.sub(r"^\+{1,2}", "", key)
    if setting not in (*_PROMPTS, *_PATHS) or text in ("", "null"):
        return argument
    if setting in _PROMPTS:
        text = _protect_interpolation(text)
    return f"{key}={text if sweep or is_quoted(text) else quote(text)}"


def is_quoted(text: str) -> bool:
    """Whether ``text`` is one string in Hydra's quotes, from its first to its last character."""
    if len(text) < 2 or text[0] not in "'\"" or text[-1] != text[0]:
        return False
    inner, quote_mark = text[1:-1], text[0]
    backslashes = 0
    for character in inner:
        if character == quote_mark and backslashes % 2 == 0:
            return False
        backslashes = backslashes + 1 if character == "\\" else 0
    return backslashes % 2 == 0


def quote(text: str) -> str:
    """One Hydra string that reads back as ``text``."""
    # A backslash escapes only where it stands before a quote or the end.
    escaped = re.sub(r"(\\*)('|\Z)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), text)
    return f"'{escaped}'"


def _protect_interpolation(text: str) -> str:
    # For OmegaConf a backslash escapes only where it stands before "${".
    return re.sub(r"(\\*)\$\{", lambda m: m[1] * 2 + "\\${", text)
