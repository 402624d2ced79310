"""The sizes that positions depend on, as a hashable record that needs no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Geometry:
    """Latent sizes of one request; ``fps`` in frames per second turns latent frames into seconds.

    ``keyframes``: pixel frames of the images whose tokens follow those of the grid, one latent frame of tokens each.
    """

    latent_frames: int
    latent_height: int
    latent_width: int
    fps: float
    audio_tokens: int
    keyframes: tuple[int, ...] = ()

    @property
    def frame_tokens(self) -> int:
        """Video tokens of one latent frame."""
        return self.latent_height * self.latent_width

    @property
    def grid_tokens(self) -> int:
        """Video tokens that become the video."""
        return self.latent_frames * self.frame_tokens

    @property
    def video_tokens(self) -> int:
        """All video tokens, those of the keyframes included."""
        return (self.latent_frames + len(self.keyframes)) * self.frame_tokens
