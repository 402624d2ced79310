"""The sizes that positions depend on, as a hashable record that needs no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Geometry:
    """Latent sizes of one request; ``fps`` in frames per second turns latent frames into seconds."""

    latent_frames: int
    latent_height: int
    latent_width: int
    fps: float
    audio_tokens: int

    @property
    def video_tokens(self) -> int:
        return self.latent_frames * self.latent_height * self.latent_width
