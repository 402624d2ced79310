"""Every way a Wan checkpoint can be found, in either layout, or refused in one sentence."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import tiny_wan
from tests.tiny_ltx2 import tiny_checkpoints
from tests.tiny_wan import CLIP, UMT5, VAES, VARIANTS, save_diffusers, save_original, tiny_constants
from vgen.checkpoint_files import resolve
from vgen.checkpoint_headers import CheckpointError
from vgen.models.errors import ConfigError
from vgen.models.wan.config import WanArchitecture, transformer_config
from vgen.models.wan.encoder_configs import UMT5_XXL
from vgen.wan_files import COMPONENTS, WanCheckpoint, resolve_wan

COMMIT = "0123456789abcdef0123456789abcdef01234567"
T5 = "models_t5_umt5-xxl-enc-bf16.pth"
CLIP_FILE = "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth"
WEIGHTS = "diffusion_pytorch_model.safetensors"
USE = "; use a folder or hub id of Wan, such as Wan-AI/Wan2.2-TI2V-5B-Diffusers or Wan-AI/Wan2.2-TI2V-5B"
SAVE = {"diffusers": save_diffusers, "original": save_original}
KINDS = {
    "ti2v": ("2.2", "ti2v"),
    "t2v_a14b": ("2.2", "t2v"),
    "i2v_a14b": ("2.2", "i2v"),
    "t2v_2_1": ("2.1", "t2v"),
    "i2v_2_1": ("2.1", "i2v"),
}


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_constants(monkeypatch)


@cache
def written(layout: str, variant: str, root: Path) -> Path:
    return SAVE[layout](root / layout / variant, variant)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("wan")


@pytest.fixture
def copy(root: Path, tmp_path: Path) -> Callable[[str, str], Path]:
    """A folder of a layout and a variant that a test may change."""

    def make(layout: str, variant: str) -> Path:
        return shutil.copytree(written(layout, variant, root), tmp_path / layout / variant)

    return make


def find(path: Path, components: Sequence[str] = COMPONENTS) -> WanCheckpoint:
    return resolve_wan(str(path), components=components, allow_pickle=True)


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as raised:
        call()
    message = str(raised.value)
    assert "\n" not in message
    return message


def edit(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in content.items() if value != "absent"}))


@pytest.mark.parametrize("layout", SAVE)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_files_say_what_the_model_is(layout: str, variant: str, root: Path) -> None:
    path = written(layout, variant, root)
    found = find(path)
    sizes = VARIANTS[variant]
    two, image = sizes.boundary is not None, "image_dim" in sizes.transformer
    assert (found.layout, found.id, found.revision, found.path) == (layout, str(path), None, path)
    assert (found.version, found.kind) == KINDS[variant]
    config = transformer_config(
        {**tiny_wan.TRANSFORMER, **sizes.transformer, "eps": 1e-6, "cross_attn_norm": True, "rope_max_seq_len": 1024}
    )
    assert found.transformer == config
    assert found.vae == VAES[sizes.vae]
    assert found.num_transformers == 1 + two
    assert found.boundary == (sizes.boundary if layout == "diffusers" else None)
    assert found.text_encoder_config is not None
    assert {name: found.text_encoder_config[name] for name in UMT5} == UMT5
    assert (found.image_encoder_config is not None) == image
    assert {name: (found.image_encoder_config or CLIP)[name] for name in CLIP} == CLIP
    assert found.tokenizer_folder == path / ("tokenizer" if layout == "diffusers" else "google/umt5-xxl")
    parts = {"text_encoder", "transformer", "vae"} | ({"transformer_2"} if two else set())
    assert set(found.files) == parts | ({"image_encoder"} if image else set())
    pickles = {name for name, files in found.files.items() if isinstance(files, Path)}
    assert pickles == (set() if layout == "diffusers" else set(found.files) - {"transformer", "transformer_2"})
    architecture = WanArchitecture(config, VAES[sizes.vae], 1 + two, found.image_encoder_config or {})
    assert found.architecture == architecture


@pytest.mark.parametrize("layout", SAVE)
def test_files_survive_the_way_to_another_process(layout: str, root: Path) -> None:
    for components in (COMPONENTS, ("vae",)):
        found = find(written(layout, "t2v_a14b", root), components)
        assert WanCheckpoint.from_mapping(json.loads(json.dumps(found.to_mapping()))) == found


@pytest.mark.parametrize("layout", SAVE)
@pytest.mark.parametrize("variant", ["ti2v", "i2v_2_1"])
def test_only_what_is_asked_for_has_to_be_there(layout: str, variant: str, copy: Callable[[str, str], Path]) -> None:
    folder = copy(layout, variant)
    whole = find(folder)
    for path in folder.rglob("*"):
        keeps = [
            "vae",
            "config.json",
            "model_index",
            "VAE",
            *(["transformer", WEIGHTS] if variant == "i2v_2_1" else []),
        ]
        if path.is_file() and not any(part in str(path.relative_to(folder)) for part in keeps):
            path.unlink()
    found = find(folder, ("vae",))
    assert "vae" in found.files
    assert (found.kind, found.vae) == (whole.kind, whole.vae)
    assert (found.text_encoder_config, found.tokenizer_folder) == (None, None)
    message = refusal(lambda: find(folder, ("vae", "text_encoder")))
    lacking = {
        "diffusers": "tokenizer/tokenizer.json",
        "original": f"{T5}, google/umt5-xxl/tokenizer.json",
    }[layout]
    assert message == f"the Wan checkpoint {folder} lacks {lacking}; download it completely"


def test_a_component_that_the_model_lacks_is_not_asked_for(root: Path) -> None:
    for layout in SAVE:
        found = find(written(layout, "t2v_2_1", root), ("transformer", "transformer_2", "image_encoder"))
        assert set(found.files) == {"transformer"}


def test_an_image_model_s_sizes_need_its_weights_in_the_original_layout(copy: Callable[[str, str], Path]) -> None:
    folder = copy("original", "i2v_2_1")
    assert set(find(folder, ("vae",)).files) == {"vae", "transformer"}
    (folder / WEIGHTS).unlink()
    assert refusal(lambda: find(folder, ("vae",))) == f"{folder} has no .safetensors file; download it completely"


def test_without_an_index_the_folders_tell(copy: Callable[[str, str], Path]) -> None:
    for variant, number in (("t2v_a14b", 2), ("t2v_2_1", 1)):
        folder = copy("diffusers", variant)
        (folder / "model_index.json").unlink()
        found = find(folder)
        assert (found.num_transformers, found.boundary) == (number, None)


def test_unknown_keys_and_null_components_are_no_matter(copy: Callable[[str, str], Path]) -> None:
    folder = copy("diffusers", "i2v_a14b")
    assert json.loads((folder / "model_index.json").read_text())["image_encoder"] == [None, None]
    edit(folder / "vae" / "config.json", clip_output=False, other=[1])
    assert "image_encoder" not in find(folder).files


def test_pickles_are_refused_unasked(root: Path) -> None:
    path = written("original", "i2v_2_1", root)
    assert refusal(lambda: resolve_wan(str(path))) == (
        f"the Wan checkpoint '{path}' has {CLIP_FILE}, {T5}, Wan2.1_VAE.pth, and pickles are not read unasked; set "
        f"model.allow_pickle=true or use the -Diffusers repository"
    )
    assert "has Wan2.1_VAE.pth, and pickles" in refusal(lambda: resolve_wan(str(path), components=("vae",)))
    assert resolve_wan(str(path), components=("transformer",)).kind == "i2v"
    mapping = find(path).to_mapping() | {"allow_pickle": False}
    assert "pickles are not read unasked" in refusal(lambda: WanCheckpoint.from_mapping(mapping))


@pytest.mark.parametrize(
    ("layout", "variant", "lost", "says"),
    [
        ("diffusers", "ti2v", "vae/config.json", "lacks vae/config.json"),
        ("diffusers", "ti2v", "text_encoder/config.json", "lacks text_encoder/config.json"),
        ("diffusers", "t2v_a14b", "transformer_2/config.json", "lacks transformer_2/config.json"),
        ("diffusers", "ti2v", f"transformer/{WEIGHTS}", "/transformer has no .safetensors file"),
        ("diffusers", "i2v_2_1", "image_encoder/config.json", "lacks image_encoder/config.json"),
        ("original", "ti2v", "Wan2.2_VAE.pth", "lacks Wan2.2_VAE.pth"),
        ("original", "t2v_a14b", "low_noise_model/config.json", "lacks low_noise_model/config.json"),
        ("original", "t2v_a14b", f"low_noise_model/{WEIGHTS}", "/low_noise_model has no .safetensors file"),
        ("original", "i2v_2_1", CLIP_FILE, f"lacks {CLIP_FILE}"),
        ("original", "ti2v", "google/umt5-xxl/tokenizer.json", "lacks google/umt5-xxl/tokenizer.json"),
    ],
)
def test_what_is_missing_is_named(
    layout: str, variant: str, lost: str, says: str, copy: Callable[[str, str], Path]
) -> None:
    folder = copy(layout, variant)
    (folder / lost).unlink()
    message = refusal(lambda: find(folder))
    assert f"{says}; download it completely" in message
    assert str(folder) in message


def test_a_missing_shard_is_named(copy: Callable[[str, str], Path]) -> None:
    for layout, place in (("diffusers", "transformer"), ("original", "")):
        folder = copy(layout, "ti2v") / place
        tensors = load_file(folder / WEIGHTS)
        (folder / WEIGHTS).unlink()
        shards = [f"diffusion_pytorch_model-0000{part}-of-00002.safetensors" for part in (1, 2)]
        index = {name: shards[number % 2] for number, name in enumerate(sorted(tensors))}
        for shard in shards:
            save_file({name: tensor for name, tensor in tensors.items() if index[name] == shard}, folder / shard)
        (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": index}))
        checkpoint = folder.parent if place else folder
        assert len(find(checkpoint).files["transformer"]) == 2  # type: ignore[arg-type]
        (folder / shards[1]).unlink()
        assert refusal(lambda checkpoint=checkpoint: find(checkpoint)) == (  # type: ignore[misc]
            f"{folder} lacks 1 of 2 files of {WEIGHTS}.index.json, first {shards[1]}; download it completely"
        )


def test_a_pickle_that_is_none_is_named(copy: Callable[[str, str], Path]) -> None:
    path = copy("original", "ti2v") / "Wan2.2_VAE.pth"
    path.write_bytes(b"<html>")
    assert refusal(lambda: find(path.parent)) == (
        f"{path} is not what torch.save writes, as its name says; download it again"
    )
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert "is a Git LFS pointer" in refusal(lambda: find(path.parent))


def quantize(path: Path) -> None:
    save_file({name: tensor.to(torch.float8_e4m3fn) for name, tensor in load_file(path).items()}, path)


@pytest.mark.parametrize(
    ("layout", "file"),
    [
        ("diffusers", f"transformer/{WEIGHTS}"),
        ("diffusers", f"vae/{WEIGHTS}"),
        ("diffusers", "text_encoder/model.safetensors"),
        ("original", WEIGHTS),
    ],
)
def test_quantized_files_are_refused(layout: str, file: str, copy: Callable[[str, str], Path]) -> None:
    path = copy(layout, "ti2v") / file
    quantize(path)
    folder = path if layout == "diffusers" and path.parent.name == "ti2v" else path.parents[layout == "diffusers"]
    message = refusal(lambda: find(folder))
    assert message.startswith(f"{path} is cast to fp8 without scales (")
    assert message.endswith("use the bf16 file")


def test_two_transformers_of_different_sizes_are_refused(copy: Callable[[str, str], Path]) -> None:
    folder = copy("diffusers", "t2v_a14b")
    edit(folder / "transformer_2" / "config.json", ffn_dim=128, eps=1e-5)
    assert refusal(lambda: find(folder)) == (
        f"the two transformers of {folder} have different sizes (ffn_dim 96 and 128, eps 1e-06 and 1e-05); use the two "
        f"that belong together"
    )
    assert find(folder, ("transformer", "vae")).num_transformers == 2
    folder = copy("original", "i2v_a14b")
    edit(folder / "low_noise_model" / "config.json", num_layers=3)
    assert "different sizes (num_layers 2 and 3);" in refusal(lambda: find(folder))


def test_another_vae_is_refused(copy: Callable[[str, str], Path]) -> None:
    folder, other = copy("diffusers", "ti2v"), copy("diffusers", "t2v_2_1")
    shutil.copy(other / "vae" / WEIGHTS, folder / "vae" / WEIGHTS)
    assert refusal(lambda: find(folder, ("vae",))) == (
        f"{folder / 'vae'} holds the video VAE of Wan 2.1 with 16 latent channels; this model needs that of Wan 2.2 "
        f"with 48: use the VAE that came with the model"
    )
    shutil.copy(other / "vae" / "config.json", folder / "vae" / "config.json")
    assert refusal(lambda: find(folder)) == (
        f"{folder / 'vae'} is the video VAE of Wan 2.1 with 16 latent channels; the transformer has 48: use the VAE "
        f"that came with it"
    )
    folder = copy("original", "t2v_2_1")
    edit(folder / "config.json", out_dim=4)
    assert refusal(lambda: find(folder)) == (
        f"{folder / 'config.json'} has out_dim=4; VAEs of the original layout have 16 or 48 latent channels: {USE[2:]}"
    )


def test_another_encoder_is_refused(copy: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copy("diffusers", "i2v_2_1")
    text_config, image_config = folder / "text_encoder" / "config.json", folder / "image_encoder" / "config.json"
    edit(text_config, model_type="t5")
    assert refusal(lambda: find(folder)) == (
        f"{text_config.parent} has model_type=t5 and d_model=48; the transformer needs umt5 and 48: use the "
        f"text_encoder that came with it"
    )
    edit(text_config, model_type="umt5", d_model=64)
    assert "has model_type=umt5 and d_model=64; the transformer needs umt5 and 48" in refusal(lambda: find(folder))
    edit(text_config, d_model=48)
    edit(image_config, hidden_size=44)
    assert refusal(lambda: find(folder)) == (
        f"{image_config.parent} has model_type=clip_vision_model and hidden_size=44; the transformer needs "
        f"clip_vision_model and 40: use the image_encoder that came with it"
    )
    monkeypatch.setattr("vgen.wan_files.UMT5_XXL", UMT5_XXL)
    folder = copy("original", "t2v_2_1")
    assert f"{folder / T5} has model_type=umt5 and d_model=4096; the transformer needs umt5 and 48" in refusal(
        lambda: find(folder)
    )


def test_transformers_of_another_sort_are_refused(copy: Callable[[str, str], Path]) -> None:
    folder, original = copy("diffusers", "t2v_2_1"), copy("original", "t2v_2_1")
    theirs, ours = folder / "transformer" / WEIGHTS, original / WEIGHTS
    kept = theirs.read_bytes()
    shutil.copy(ours, theirs)
    assert refusal(lambda: find(folder)) == (
        f"{folder / 'transformer'} holds a Wan transformer, not a diffusers transformer of Wan{USE}"
    )
    ours.write_bytes(kept)
    assert f"{original} holds a diffusers transformer of Wan, not a Wan transformer{USE}" == refusal(
        lambda: find(original)
    )
    save_file({"blocks.0.attn1.lora_A.weight": torch.zeros(2)}, theirs)
    assert "holds a LoRA, not a diffusers transformer of Wan" in refusal(lambda: find(folder))
    save_file({"a": torch.zeros(2)}, theirs)
    assert "holds something else, not a diffusers transformer of Wan" in refusal(lambda: find(folder))


def test_configs_of_other_models_of_the_family_are_refused(copy: Callable[[str, str], Path]) -> None:
    folder = copy("original", "t2v_2_1")
    edit(folder / "config.json", model_type="vace")
    with pytest.raises(ConfigError, match=r"config\.json has model_type='vace'; this code builds t2v"):
        find(folder)
    edit(folder / "config.json", _class_name="WanAnimateModel")
    assert refusal(lambda: find(folder)) == f"{folder} is of another model (WanAnimateModel){USE}"
    folder = copy("diffusers", "t2v_2_1")
    edit(folder / "transformer" / "config.json", _class_name="WanVACETransformer3DModel")
    assert f"{folder} is of another model (WanVACETransformer3DModel){USE}" in refusal(lambda: find(folder))


def test_ltx2_and_other_files_are_told_by_name(tmp_path: Path) -> None:
    tiny = tiny_checkpoints()
    assert refusal(lambda: find(tiny.diffusers)) == (
        f"the diffusers checkpoint {tiny.diffusers} is of LTX-2 (LTX2VideoTransformer3DModel){USE}"
    )
    assert (
        refusal(lambda: find(tiny.official))
        == f"{tiny.official} is an LTX-2 model, and Wan is loaded from a folder{USE}"
    )
    assert refusal(lambda: find(tiny.official.parent)) == (
        f"{tiny.official.parent} holds an LTX-2 model ({tiny.official.name}){USE}"
    )
    assert refusal(lambda: find(tmp_path)) == (
        f"{tmp_path} holds no model_index.json and no config.json of a Wan transformer{USE}"
    )
    save_file({"a": torch.zeros(1)}, tmp_path / "x.safetensors")
    assert "x.safetensors is one file, and Wan is loaded from a folder" in refusal(
        lambda: find(tmp_path / "x.safetensors")
    )
    assert "holds no model_index.json" in refusal(lambda: find(tmp_path))
    (tmp_path / "Wan2.2_VAE.pth").write_bytes(b"PK")
    assert "Wan2.2_VAE.pth is one file, and Wan is loaded from a folder" in refusal(
        lambda: find(tmp_path / "Wan2.2_VAE.pth")
    )


def test_ltx2_refuses_wan(root: Path) -> None:
    diffusers, original = (written(layout, "t2v_2_1", root) for layout in SAVE)
    assert "is of Wan (WanTransformer3DModel); use one of LTX-2" in refusal(lambda: resolve(str(diffusers)))
    says = "; it is a Wan model of the original layout: use it with model=wan or another Wan option"
    for folder in (original, written("original", "t2v_a14b", root)):
        assert refusal(lambda folder=folder: resolve(str(folder))).endswith(says)  # type: ignore[misc]


def test_paths_and_ids_that_are_none(root: Path) -> None:
    path = written("diffusers", "ti2v", root)
    assert "revision 'main' does not apply to the local path" in refusal(lambda: resolve_wan(str(path), "main"))
    assert "is no file or folder on this machine and no hub id" in refusal(lambda: resolve_wan("./nowhere"))
    assert "is not in this installation of vgen" in refusal(lambda: resolve_wan("vgen://nothing"))
    assert refusal(lambda: resolve_wan("Wan-AI/Wan2.2-TI2V-5B/Wan2.2_VAE.pth")) == (
        "'Wan-AI/Wan2.2-TI2V-5B/Wan2.2_VAE.pth' names one file of several that Wan needs; give the repository: "
        "'Wan-AI/Wan2.2-TI2V-5B'"
    )


REPOSITORY = {
    "diffusers": [
        "README.md",
        "model_index.json",
        "scheduler/scheduler_config.json",
        "text_encoder/config.json",
        "text_encoder/model-00001-of-00005.safetensors",
        "text_encoder/model.safetensors.index.json",
        "tokenizer/spiece.model",
        "tokenizer/tokenizer.json",
        "tokenizer/tokenizer_config.json",
        "transformer/config.json",
        "transformer/diffusion_pytorch_model-00001-of-00012.safetensors",
        "transformer/diffusion_pytorch_model.safetensors.index.json",
        "transformer_2/config.json",
        "transformer_2/diffusion_pytorch_model-00001-of-00012.safetensors",
        "vae/config.json",
        "vae/diffusion_pytorch_model.safetensors",
    ],
    "original": [
        "README.md",
        "assets/logo.png",
        "configuration.json",
        "google/umt5-xxl/spiece.model",
        "google/umt5-xxl/tokenizer.json",
        "google/umt5-xxl/tokenizer_config.json",
        "high_noise_model/config.json",
        "high_noise_model/diffusion_pytorch_model-00001-of-00006.safetensors",
        "high_noise_model/diffusion_pytorch_model.safetensors.index.json",
        "low_noise_model/config.json",
        "low_noise_model/diffusion_pytorch_model-00001-of-00006.safetensors",
        "low_noise_model/diffusion_pytorch_model.safetensors.index.json",
        T5,
        "Wan2.1_VAE.pth",
    ],
    "original root": [
        "config.json",
        "diffusion_pytorch_model.safetensors",
        "google/umt5-xxl/tokenizer.json",
        CLIP_FILE,
        T5,
        "Wan2.1_VAE.pth",
        "Wan2.2_VAE.pth",
        "xlm-roberta-large/tokenizer.json",
    ],
}
DESCRIPTION = {
    "diffusers": {"model_index.json", "transformer/config.json", "vae/config.json"},
    "original": {"high_noise_model/config.json", "low_noise_model/config.json"},
    "original root": {"config.json"},
}


@pytest.mark.parametrize(
    ("repository", "variant", "components", "needed"),
    [
        (
            "diffusers",
            "t2v_a14b",
            COMPONENTS,
            set(REPOSITORY["diffusers"]) - {"README.md", "scheduler/scheduler_config.json", "tokenizer/spiece.model"},
        ),
        ("diffusers", "t2v_a14b", ("vae",), {f"vae/{WEIGHTS}"}),
        (
            "original",
            "t2v_a14b",
            COMPONENTS,
            set(REPOSITORY["original"])
            - {"README.md", "assets/logo.png", "configuration.json", "google/umt5-xxl/spiece.model"},
        ),
        ("original", "t2v_a14b", ("vae",), {"Wan2.1_VAE.pth"}),
        ("original root", "t2v_2_1", ("transformer", "vae"), {WEIGHTS, "Wan2.1_VAE.pth"}),
        ("original root", "ti2v", ("vae",), {"Wan2.2_VAE.pth"}),
        ("original root", "i2v_2_1", ("vae", "image_encoder"), {WEIGHTS, "Wan2.1_VAE.pth", CLIP_FILE}),
    ],
)
def test_only_the_needed_files_of_a_repository_are_fetched(
    repository: str,
    variant: str,
    components: Sequence[str],
    needed: set[str],
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """First the JSON files that tell the layout, then of the same commit what the task reads."""
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    layout = repository.split()[0]
    snapshot = tmp_path / "snapshots" / COMMIT
    for path in written(layout, variant, root).rglob("config.json"):
        (snapshot / path.relative_to(written(layout, variant, root))).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, snapshot / path.relative_to(written(layout, variant, root)))
    if layout == "diffusers":
        shutil.copy(written(layout, variant, root) / "model_index.json", snapshot)
    calls: list[dict[str, Any]] = []

    def download(repo: str, **options: Any) -> str:
        calls.append(options)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    refusal(lambda: resolve_wan("org/name", "v1", components=components, allow_pickle=True))
    asked = [call["allow_patterns"] for call in calls]
    fetched = [set(filter_repo_objects(REPOSITORY[repository], allow_patterns=patterns)) for patterns in asked]
    # The commit is looked for in the cache, then fetched, as the cache lacks the weights.
    assert [(call["revision"], call["local_files_only"]) for call in calls] == [
        ("v1", False),
        (COMMIT, True),
        (COMMIT, False),
    ]
    assert fetched == [DESCRIPTION[repository], *[DESCRIPTION[repository] | needed] * 2]

    if layout == "original":
        calls.clear()
        assert "'org/name' has " in refusal(lambda: resolve_wan("org/name", "v1", components=components))
        assert len(calls) == 1, "pickles are refused before they are downloaded"


_ASK = """
import json, sys
from vgen.checkpoint_headers import CheckpointError
from vgen.wan_files import resolve_wan
for asked, revision, components in json.loads(sys.argv[1]):
    try:
        found = resolve_wan(asked, revision, components=components, allow_pickle=True)
        print(found.layout, found.id, found.revision, sorted(found.files))
    except CheckpointError as error:
        print(error)
"""


def test_the_cache_serves_without_network(root: Path, tmp_path: Path) -> None:
    for name, layout in (("a", "diffusers"), ("b", "original")):
        repo = tmp_path / "hub" / f"models--org--{name}"
        shutil.copytree(written(layout, "t2v_2_1", root), repo / "snapshots" / COMMIT)
        (repo / "refs").mkdir()
        (repo / "refs" / "main").write_text(COMMIT)
    questions = [["org/a", None, COMPONENTS], ["org/a", COMMIT, ["vae"]], ["org/b", "main", ["transformer", "vae"]]]
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", _ASK, json.dumps([*questions, ["org/c", None, ["vae"]]])]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    assert result[:3] == [
        f"diffusers org/a {COMMIT} ['text_encoder', 'transformer', 'vae']",
        f"diffusers org/a {COMMIT} ['vae']",
        f"original org/b {COMMIT} ['transformer', 'vae']",
    ]
    assert result[3].startswith("'org/c' is not on this machine and cannot be fetched; the hub is out of reach")
