"""Wan 2.1 and 2.2: their sizes and their modules, named as in the diffusers checkpoints."""
