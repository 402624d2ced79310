"""Finds the files of a Wan checkpoint, in the diffusers or the original layout, and reads its sizes; needs no torch.

A diffusers folder has a folder of safetensors files for each component. The original layout has them for transformers
only: its VAE and its encoders are pickles without a config, whose sizes are those of the published ones.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from vgen.checkpoint_headers import (
    CheckpointError,
    Header,
    check_pickle,
    read_header,
    read_json,
    refuse_quantized,
    weight_headers,
)
from vgen.checkpoint_kinds import DIFFUSERS_TRANSFORMERS, name_of
from vgen.checkpoint_paths import commit, folder_patterns, from_snapshot, hub_id, local_path, no_local_revision
from vgen.models.wan.config import (
    VAE_2_1,
    VAE_2_2,
    WanArchitecture,
    WanTransformerConfig,
    WanVaeConfig,
    transformer_config,
    transformer_config_original,
    vae_config,
)
from vgen.models.wan.encoder_configs import CLIP_VIT_H14, UMT5_XXL
from vgen.models.wan.keys import ORIGINAL_FILES
from vgen.models.wan.vae_kind import validate_vae_kind

Layout: TypeAlias = Literal["diffusers", "original"]
Files: TypeAlias = tuple[Header, ...] | Path
"""A component's safetensors files, or its pickle."""

COMPONENTS = ("text_encoder", "image_encoder", "transformer", "transformer_2", "vae")

_WHOLE, _HIGH_NOISE, _LOW_NOISE = ORIGINAL_FILES["transformer"]
_WEIGHTS = "diffusion_pytorch_model*"
"""How a transformer's files begin, which in the root have others beside them."""
_TOKENIZER: Mapping[Layout, str] = {"diffusers": "tokenizer", "original": ORIGINAL_FILES["tokenizer"][0]}
_TRANSFORMER: Mapping[Layout, str] = {"diffusers": "a diffusers transformer of Wan", "original": "a Wan transformer"}
_DESCRIPTION = (
    "model_index.json",
    *(f"{folder}/config.json" for folder in ("transformer", "vae", _HIGH_NOISE, _LOW_NOISE)),
    "config.json",
)
"""What tells the layout and the variant."""

_USE = "use a folder or hub id of Wan, such as Wan-AI/Wan2.2-TI2V-5B-Diffusers or Wan-AI/Wan2.2-TI2V-5B"


@dataclass(frozen=True)
class WanCheckpoint:
    """The files of one Wan checkpoint.

    ``id`` is the path or hub id as it was asked for; ``revision`` the commit on the hub, None for a local path;
    ``path`` the folder. ``boundary``: the part of 1000 where the second transformer takes over, None where the files do
    not say. ``text_encoder_config`` and ``image_encoder_config``: their ``config.json``, None like ``tokenizer_folder``
    where they are not among ``components``, what was asked for. ``files`` has of those the ones that the model has.
    """

    layout: Layout
    id: str
    revision: str | None
    path: Path
    components: tuple[str, ...]
    allow_pickle: bool
    transformer: WanTransformerConfig
    num_transformers: int
    vae: WanVaeConfig
    boundary: float | None
    text_encoder_config: dict[str, Any] | None
    image_encoder_config: dict[str, Any] | None
    tokenizer_folder: Path | None
    files: Mapping[str, Files] = field(repr=False)

    @property
    def architecture(self) -> WanArchitecture:
        return WanArchitecture(self.transformer, self.vae, self.num_transformers, self.image_encoder_config or {})

    @property
    def version(self) -> Literal["2.1", "2.2"]:
        return self.architecture.version

    @property
    def kind(self) -> Literal["t2v", "i2v", "ti2v"]:
        return self.architecture.kind

    def to_mapping(self) -> dict[str, Any]:
        """What another process needs to read the same files: JSON values, no headers."""
        asked = {"components": list(self.components), "allow_pickle": self.allow_pickle}
        return {"id": self.id, "revision": self.revision, "path": str(self.path), **asked}

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> "WanCheckpoint":
        """The inverse of ``to_mapping``: reads the headers again, asks no hub."""
        asked = tuple(mapping["components"]), mapping["allow_pickle"]
        return _from_path(mapping["id"], mapping["revision"], Path(mapping["path"]), *asked)


def resolve_wan(
    id_or_path: str,
    revision: str | None = None,
    *,
    components: Collection[str] = COMPONENTS,
    allow_pickle: bool = False,
) -> WanCheckpoint:
    """Find a Wan checkpoint; on the hub, download what the cache lacks.

    Args:
        id_or_path: a folder of either layout (also as ``vgen://<path>``) or a hub id ``org/name``.
        revision: branch, tag or commit on the hub; None is the main branch, or what is cached without network.
        components: those of ``COMPONENTS`` whose weights have to be there if the model has them; no others are
            downloaded. The configs of transformer and VAE are read always; of an image-to-video model in the original
            layout the transformer's weights too, whose shapes say what its config leaves out.
        allow_pickle: whether the VAE and the encoders of the original layout may be read.

    Raises:
        CheckpointError: nothing is there, or it is no usable checkpoint; one sentence with the fix.
        ConfigError: a config lacks a value, or is of another architecture.
    """
    asked = tuple(components)
    path = local_path(id_or_path)
    if path.exists():
        no_local_revision(id_or_path, revision)
        return _from_path(id_or_path, None, path, asked, allow_pickle)
    repo, file = hub_id(id_or_path)
    if file is not None:
        raise CheckpointError(f"'{id_or_path}' names one file of several that Wan needs; give the repository: '{repo}'")

    def plan(path: Path) -> tuple[str | None, list[str]]:
        found = _plan(path, asked)
        _refuse_pickles(id_or_path, found, allow_pickle)
        return commit(path), [*_DESCRIPTION, *_patterns(found)]

    found_revision, patterns = from_snapshot(repo, revision, _DESCRIPTION, plan)
    return from_snapshot(
        repo,
        found_revision or revision,
        patterns,
        lambda path: _from_path(id_or_path, commit(path), path, asked, allow_pickle),
    )


@dataclass(frozen=True)
class _Plan:
    """Where a folder of ``layout`` has its transformers, and the components that are wanted: a folder or file for each,
    "" for the root.
    """

    layout: Layout
    transformers: tuple[str, ...]
    places: Mapping[str, str]


def _plan(path: Path, components: Collection[str]) -> _Plan:
    """What the JSON files of the folder ``path`` say."""
    if (path / "model_index.json").is_file() or (path / "transformer" / "config.json").is_file():
        return _plan_diffusers(path, components)
    for folder in (_WHOLE, _HIGH_NOISE):
        config = path / folder / "config.json"
        if config.is_file() and read_json(config).get("_class_name") == "WanModel":
            return _plan_original(path, folder, read_json(config), components)
    raise CheckpointError(f"{path} {_content(path)}; {_USE}")


def _plan_diffusers(path: Path, components: Collection[str]) -> _Plan:
    _require(path, ["transformer/config.json", "vae/config.json"])
    config, index = read_json(path / "transformer" / "config.json"), path / "model_index.json"
    name = config.get("_class_name")
    if name != "WanTransformer3DModel":
        of = DIFFUSERS_TRANSFORMERS.get(str(name), "another model")
        raise CheckpointError(f"the diffusers checkpoint {path} is of {of} ({name}); {_USE}")
    if index.is_file():
        two = (read_json(index).get("transformer_2") or [None])[0] is not None
    else:
        two = (path / "transformer_2").is_dir()
    transformers = ("transformer", "transformer_2") if two else ("transformer",)
    image = ("image_encoder",) if config.get("image_dim") is not None else ()
    places = (*transformers, *image, "text_encoder", "vae")
    return _Plan("diffusers", transformers, {name: name for name in places if name in components})


def _plan_original(path: Path, folder: str, config: Mapping[str, Any], components: Collection[str]) -> _Plan:
    vaes = dict(zip((VAE_2_1.z_dim, VAE_2_2.z_dim), ORIGINAL_FILES["vae"], strict=True))
    if config.get("out_dim") not in vaes:
        raise CheckpointError(
            f"{path / folder / 'config.json'} has out_dim={config.get('out_dim')}; VAEs of the original layout have "
            f"{' or '.join(map(str, vaes))} latent channels: {_USE}"
        )
    transformers = (_WHOLE,) if folder == _WHOLE else (_HIGH_NOISE, _LOW_NOISE)
    of_image = config.get("model_type") in ("i2v", "flf2v")
    places = {
        **dict(zip(("transformer", "transformer_2"), transformers, strict=False)),
        **({"image_encoder": ORIGINAL_FILES["image_encoder"][0]} if of_image and folder == _WHOLE else {}),
        "text_encoder": ORIGINAL_FILES["text_encoder"][0],
        "vae": vaes[config["out_dim"]],
    }
    wanted = {*components, "transformer"} if of_image else {*components}
    return _Plan("original", transformers, {name: place for name, place in places.items() if name in wanted})


def _patterns(plan: _Plan) -> list[str]:
    """Files of the hub that ``plan`` needs."""
    folders = [place for place in plan.places.values() if place and not place.endswith(".pth")]
    files = [place for place in plan.places.values() if place.endswith(".pth")]
    if plan.places.get("transformer") == _WHOLE:
        files += [f"{_WEIGHTS}.safetensors", f"{_WEIGHTS}.safetensors.index.json"]
    if "text_encoder" in plan.places:
        files.append(f"{_TOKENIZER[plan.layout]}/*.json")
    return [*folder_patterns(folders), *files]


def _refuse_pickles(id_or_path: str, plan: _Plan, allow_pickle: bool) -> None:
    pickles = [place for place in plan.places.values() if place.endswith(".pth")]
    if pickles and not allow_pickle:
        raise CheckpointError(
            f"the Wan checkpoint '{id_or_path}' has {', '.join(pickles)}, and pickles are not read unasked; set "
            f"model.allow_pickle=true or use the -Diffusers repository"
        )


def _from_path(
    id_or_path: str, revision: str | None, path: Path, components: tuple[str, ...], allow_pickle: bool
) -> WanCheckpoint:
    if path.is_file():
        raise CheckpointError(f"{path} is {_kind_of_file(path) or 'one file'}, and Wan is loaded from a folder; {_USE}")
    plan = _plan(path, components)
    _refuse_pickles(id_or_path, plan, allow_pickle)
    _require(path, _required(plan))
    files = {name: _files(path / place, _WEIGHTS if place == _WHOLE else "*") for name, place in plan.places.items()}
    transformer = _transformer(path, plan, files)
    vae = _vae(path, plan.layout, transformer, files.get("vae", ()))
    return WanCheckpoint(
        layout=plan.layout,
        id=id_or_path,
        revision=revision,
        path=path,
        components=components,
        allow_pickle=allow_pickle,
        transformer=transformer,
        num_transformers=len(plan.transformers),
        vae=vae,
        boundary=_boundary(path / "model_index.json") if plan.layout == "diffusers" else None,
        text_encoder_config=_encoder(path, plan, "text_encoder", UMT5_XXL, "d_model", transformer.text_dim),
        image_encoder_config=_encoder(path, plan, "image_encoder", CLIP_VIT_H14, "hidden_size", transformer.image_dim),
        tokenizer_folder=path / _TOKENIZER[plan.layout] if "text_encoder" in plan.places else None,
        files=files,
    )


def _required(plan: _Plan) -> list[str]:
    """Files that have to be there, the weights of folders apart."""
    names = [place if place.endswith(".pth") else f"{place}/config.json".lstrip("/") for place in plan.places.values()]
    return [*names, *([f"{_TOKENIZER[plan.layout]}/tokenizer.json"] if "text_encoder" in plan.places else [])]


def _content(path: Path) -> str:
    """What a folder that is not Wan's holds instead."""
    config = path / "config.json"
    if config.is_file() and "_class_name" in read_json(config):
        return f"is of another model ({read_json(config)['_class_name']})"
    for file in sorted(path.glob("*.safetensors")):
        if what := _kind_of_file(file):
            return f"holds {what} ({file.name})"
    return "holds no model_index.json and no config.json of a Wan transformer"


def _kind_of_file(path: Path) -> str | None:
    if path.suffix != ".safetensors":
        return None
    header = read_header(path)
    return name_of(header.tensors, header.metadata)


def _require(path: Path, names: Sequence[str]) -> None:
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        raise CheckpointError(f"the Wan checkpoint {path} lacks {', '.join(missing)}; download it completely")


def _files(place: Path, names: str) -> Files:
    if place.suffix == ".pth":
        return check_pickle(place)
    headers = weight_headers(place, names)
    for header in headers:
        refuse_quantized(header)
    return headers


def _transformer(path: Path, plan: _Plan, files: Mapping[str, Files]) -> WanTransformerConfig:
    """The sizes of the transformer, which a second one has too."""
    sizes = [
        _sizes(path / folder, plan.layout, files.get(name, ()))
        for name, folder in zip(("transformer", "transformer_2"), plan.transformers, strict=False)
        if name == "transformer" or name in files
    ]
    if sizes[0] != sizes[-1]:
        one, two = map(asdict, (sizes[0], sizes[-1]))
        differ = ", ".join(f"{name} {one[name]} and {two[name]}" for name in one if one[name] != two[name])
        raise CheckpointError(
            f"the two transformers of {path} have different sizes ({differ}); use the two that belong together"
        )
    return sizes[0]


def _sizes(folder: Path, layout: Layout, files: Files) -> WanTransformerConfig:
    shapes = _shapes(files)
    what = name_of(shapes, {})
    if shapes and what != _TRANSFORMER[layout]:
        raise CheckpointError(f"{folder} holds {what or 'something else'}, not {_TRANSFORMER[layout]}; {_USE}")
    config = read_json(folder / "config.json")
    return transformer_config(config) if layout == "diffusers" else transformer_config_original(config, shapes or None)


def _shapes(files: Files) -> dict[str, tuple[int, ...]]:
    """Of all tensors; of a pickle none."""
    headers = () if isinstance(files, Path) else files
    return {name: info.shape for header in headers for name, info in header.tensors.items()}


def _vae(path: Path, layout: Layout, transformer: WanTransformerConfig, files: Files) -> WanVaeConfig:
    if layout == "original":
        return VAE_2_1 if transformer.out_channels == VAE_2_1.z_dim else VAE_2_2
    vae = vae_config(read_json(path / "vae" / "config.json"))
    if vae.z_dim != transformer.out_channels:
        kind = "2.2" if vae.is_residual else "2.1"
        raise CheckpointError(
            f"{path / 'vae'} is the video VAE of Wan {kind} with {vae.z_dim} latent channels; the transformer has "
            f"{transformer.out_channels}: use the VAE that came with it"
        )
    if shapes := _shapes(files):
        check_vae(shapes, vae, path / "vae")
    return vae


def check_vae(shapes: Mapping[str, Sequence[int]], config: WanVaeConfig, source: Path) -> None:
    """Raises CheckpointError: the tensors of these shapes in ``source`` are not the VAE that ``config`` describes."""
    try:
        validate_vae_kind(shapes, config, str(source))
    except ValueError as error:
        raise CheckpointError(str(error)) from None


def _boundary(index: Path) -> float | None:
    return read_json(index).get("boundary_ratio") if index.is_file() else None


def _encoder(
    path: Path, plan: _Plan, name: str, published: Mapping[str, Any], key: str, width: int | None
) -> dict[str, Any] | None:
    """The ``config.json`` of an encoder, whose states are ``key`` values wide."""
    if name not in plan.places:
        return None
    config = dict(published) if plan.layout == "original" else read_json(path / name / "config.json")
    if (config.get("model_type"), config.get(key)) != (published["model_type"], width):
        raise CheckpointError(
            f"{path / plan.places[name]} has model_type={config.get('model_type')} and {key}={config.get(key)}; the "
            f"transformer needs {published['model_type']} and {width}: use the {name} that came with it"
        )
    return config
