"""The sizes that a family can make, and the sentence for one that it cannot."""

from dataclasses import dataclass
from typing import Literal, Protocol

from vgen.config import Config
from vgen.typed import ConfigurationError


class Sized(Protocol):
    @property
    def num_frames(self) -> int: ...
    @property
    def height(self) -> int: ...
    @property
    def width(self) -> int: ...


@dataclass(frozen=True)
class SizeRule:
    """Frames are ``time`` k + 1; height and width multiples of ``space``, ``smallest`` at least. ``why`` says where
    the multiple comes from, after the number."""

    time: int
    space: int
    smallest: int
    why: str = ""

    def validate(self, where: str, size: Sized) -> None:
        """Raises ConfigurationError: with the two nearest legal values; ``where`` is the group's name."""
        for name in ("height", "width"):
            _validate_multiple(
                f"{where}.{name}", getattr(size, name), self.space, offset=0, smallest=self.smallest, why=self.why
            )
        _validate_multiple(f"{where}.num_frames", size.num_frames, self.time, offset=1, smallest=1)

    def tokens(self, size: Sized) -> int:
        """A number that is the same for sizes with the same number of tokens."""
        return (size.num_frames // self.time + 1) * size.height * size.width

    def validate_halved(self, where: str, size: Sized) -> None:
        """``validate`` for a size whose half has to be legal too."""
        for name in ("height", "width"):
            _validate_multiple(
                f"{where}.{name}", getattr(size, name), 2 * self.space, offset=0, smallest=2 * self.space
            )


def halo_axis(config: Config, latent_height: int, latent_width: int) -> Literal["height", "width"] | None:
    """Which side of the latents the VAE's ranks have to share line by line; None where they need not: ``auto`` shares
    tiles where there are too few lines."""
    parallel = config.parallel
    if parallel.vae_strategy != "halo":
        return None
    if parallel.vae_split != "auto":
        return parallel.vae_split
    return "height" if latent_height >= latent_width else "width"


def _validate_multiple(name: str, value: int, step: int, *, offset: int, smallest: int, why: str = "") -> None:
    if value >= smallest and (value - offset) % step == 0:
        return
    below = (value - offset) // step * step + offset
    nearest = f"{below} or {below + step}" if below >= smallest else f"{smallest}"
    rule = f"a multiple of {step}{why}" if offset == 0 else f"{step}k + {offset}"
    floor = f" and at least {smallest}" if value < smallest else ""
    raise ConfigurationError(f"{name}={value} is not {rule}{floor}; use {nearest}")
