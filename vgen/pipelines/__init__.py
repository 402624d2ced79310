"""One module per family: from a request to its files."""

from typing import Any, Protocol

from torch import Tensor

from vgen.job import Job
from vgen.metrics.timer import Timer
from vgen.pipelines.types import Sink
from vgen.requests import Request
from vgen.residency import Residency
from vgen.stages.decode import Sound


class Pipeline(Protocol):
    """The functions of each module of this package; components and decoders are those of ``transforms``."""

    def generate(self, components: Any, request: Request, sampler: Any, sink: Sink, timer: Timer = ...) -> None:
        """One request to its files; latents reach ``sink`` before anything is decoded.

        Raises:
            NumericsError: NaN or infinity after the first step or before decode.
        """

    def follow(self, follower: Any, request: Request, sink: Sink, timer: Timer = ...) -> None:
        """One request on a rank that only decodes.

        Raises:
            NumericsError: NaN or infinity before decode.
        """

    def decode(
        self,
        decoders: Any,
        video: Tensor,
        audio: Tensor | None,
        sink: Sink,
        residency: Residency,
        timer: Timer = ...,
        kept: Sound | None = None,
    ) -> None:
        """Latents to files, as ``generate`` gave them to ``sink``.

        Raises:
            NumericsError: NaN or infinity in the latents or the waveform.
        """


def pipeline_of(job: Job) -> Pipeline:
    from vgen.pipelines import ltx2, wan

    modules: dict[str, Pipeline] = {"ltx2": ltx2, "wan": wan}
    return modules[job.config.model.family]
