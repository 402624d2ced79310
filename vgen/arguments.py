"""Lets a prompt on the command line be any text, without a second layer of quotes for Hydra's grammar."""

import re

_PROMPT = re.compile(r"^(\+{0,2}request\.(?:prompt|negative_prompt))=(.*)$", re.DOTALL)
_MULTIRUN = ("-m", "--multirun")


def prepare(arguments: list[str]) -> list[str]:
    """Quote prompt values for Hydra.

    On a single run the text after ``request.prompt=`` is the prompt, whatever it holds; only a value that already
    is one quoted string is left as it is. In a sweep Hydra's own rules hold, since a comma separates choices there;
    ``${`` is protected in both, so that a prompt is never taken for an interpolation.
    """
    sweep = any(argument in _MULTIRUN for argument in arguments)
    return [_prepare_one(argument, sweep) for argument in arguments]


def _prepare_one(argument: str, sweep: bool) -> str:
    match = _PROMPT.match(argument)
    if match is None or match[2] in ("", "null"):
        return argument
    key, text = match.groups()
    if sweep or is_quoted(text):
        return f"{key}={_protect_interpolation(text)}"
    return f"{key}={quote(text)}"


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
    # Hydra: a backslash escapes only where it stands before a quote or the end; OmegaConf: only before "${".
    escaped = re.sub(r"(\\*)('|\Z)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), _protect_interpolation(text))
    return f"'{escaped}'"


def _protect_interpolation(text: str) -> str:
    return re.sub(r"(\\*)\$\{", lambda m: m[1] * 2 + "\\${", text)
