"""The parts of a pipeline: text, latents, denoise, decode."""
