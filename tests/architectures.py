"""The architectures of conf/model at full size, as records."""

from functools import cache

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from vgen import app
from vgen.models.ltx2.config import LTX2Config
from vgen.models.ltx2.config_official import from_official


@cache
def architecture(model: str) -> LTX2Config:
    """What ``model=<model> model.weights=random`` builds."""
    with initialize_config_dir(app.conf_dir(), version_base="1.3"):
        config = compose("config", [f"model={model}"])
    return from_official(OmegaConf.to_container(config.model.architecture, resolve=True))  # type: ignore[arg-type]
