"""vgen runs and compares multi-GPU inference of video models."""

__version__ = "0.1.0"
