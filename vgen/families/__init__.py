"""What the parent has to know of a model family: its files, its sizes, its rules. Needs no torch."""

from typing import Any, Protocol

from vgen.config import Config
from vgen.families.sizes import SizeRule
from vgen.parallel.plans import Limits
from vgen.requests import Request


class Family(Protocol):
    """The functions of each module of this package; ``checkpoint`` and ``architecture`` are of its own types."""

    def find_files(self, settings: Config) -> tuple[Any, Any]:
        """Find the checkpoint and, where it is another one, the text encoder; ask the hub for what is not here.

        Raises:
            CheckpointError: one sentence with the fix.
        """

    def read_files(self, checkpoint: Any, text_encoder: Any) -> tuple[Any, Any]:
        """The files that ``find_files`` found in another process, from their mappings; None stays None."""

    def architecture_of(self, settings: Config, checkpoint: Any) -> Any:
        """The sizes of all components.

        Raises:
            ConfigError: they are missing or of another architecture.
        """

    def size_rule(self, architecture: Any) -> SizeRule: ...

    def pass_names(self, request: Request, config: Config) -> tuple[str, ...]:
        """The transformer's passes of a step, the conditional one first."""

    def limits(self, config: Config, requests: tuple[Request, ...], architecture: Any) -> Limits:
        """What the model and its requests can be spread over; of several requests the tightest of each."""

    def validate(self, config: Config, requests: tuple[Request, ...], architecture: Any, checkpoint: Any) -> None:
        """The rules of this family alone.

        Raises:
            ConfigurationError: the first that does not hold.
        """

    def validate_training(self, config: Config, architecture: Any) -> None:
        """Raises ConfigurationError: ``task=train_tiny`` does not train this."""


def family_of(settings: Config) -> Family:
    from vgen.families import ltx2, wan

    modules: dict[str, Family] = {"ltx2": ltx2, "wan": wan}
    return modules[settings.model.family]
