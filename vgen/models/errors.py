"""What is wrong with the description of a model; needs no torch."""


class ConfigError(ValueError):
    """A checkpoint describes an architecture that is incomplete or that this code does not build."""
