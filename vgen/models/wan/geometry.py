"""The sizes that positions depend on, as a hashable record that needs no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Geometry:
    """Latent sizes of one request; ``patch_size``: latents per token along frames, height and width.

    Raises:
        ValueError: a size is not a multiple of its patch.
    """

    latent_frames: int
    latent_height: int
    latent_width: int
    patch_size: tuple[int, int, int] = (1, 2, 2)

    def __post_init__(self) -> None:
        sizes = (self.latent_frames, self.latent_height, self.latent_width)
        for name, size, patch in zip(("frames", "height", "width"), sizes, self.patch_size, strict=True):
            if size < 1 or size % patch:
                raise ValueError(f"{size} latents of {name} are no whole number of patches; use a multiple of {patch}")

    @property
    def grid(self) -> tuple[int, int, int]:
        """Tokens along frames, height and width."""
        time, height, width = self.patch_size
        return self.latent_frames // time, self.latent_height // height, self.latent_width // width

    @property
    def frame_tokens(self) -> int:
        """Tokens of one frame of the grid."""
        return self.grid[1] * self.grid[2]

    @property
    def video_tokens(self) -> int:
        """All tokens."""
        return self.grid[0] * self.frame_tokens
