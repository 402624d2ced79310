"""Prompts to what transformers attend to, whatever the family: as they come, or all before anything else is loaded."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from vgen.job import Job
from vgen.metrics.timer import Timer
from vgen.requests import Request
from vgen.residency import Residency

Text = TypeVar("Text")
Context = TypeVar("Context")


def build_encode_prompts(
    build_text: Callable[[Job, torch.device, Residency | None], Text],
    encode: Callable[[Text, Sequence[str], torch.device], list[Context]],
    parts: Sequence[str],
    job: Job,
    device: torch.device,
    residency: Residency,
    requests: Sequence[Request],
    timer: Timer,
) -> Callable[[Sequence[str]], list[Context]]:
    """Prompts to contexts; with ``model.offload=text_encoder`` all of ``requests`` now, after which it is freed.

    ``parts``: the components that ``encode`` computes with.
    """
    if job.config.model.offload != "text_encoder":
        text = build_text(job, device, residency)

        def encode_now(prompts: Sequence[str]) -> list[Context]:
            with residency.use(*parts):
                return encode(text, prompts, device)

        return encode_now
    with timer("text_encode"):
        passing = build_text(job, device, None)
        prompts = list(dict.fromkeys(one for request in requests for one in (request.prompt, request.negative_prompt)))
        contexts = dict(zip(prompts, encode(passing, prompts, device), strict=True))
        del passing
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return lambda wanted: [contexts[prompt] for prompt in wanted]
