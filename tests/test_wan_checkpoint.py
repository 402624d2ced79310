"""Loading Wan: both layouts give the tensors of the modules that were written, and anything else is an error."""

import json
import pickle
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests import tiny_wan
from tests.tiny_wan import VARIANTS, save_diffusers, save_original, tiny_constants
from vgen.checkpoint import load_module, wan_source
from vgen.checkpoint_headers import CheckpointError
from vgen.models.wan.image_encoder import build_image_encoder
from vgen.models.wan.keys import VAE_HALVES
from vgen.models.wan.plan import keeps_float32
from vgen.models.wan.text import build_text_encoder
from vgen.models.wan.transformer import WanTransformer
from vgen.models.wan.vae import VideoDecoder, VideoEncoder
from vgen.wan_files import WanCheckpoint, resolve_wan

BUILD: Mapping[str, Callable[[WanCheckpoint], nn.Module]] = {
    "transformer": lambda checkpoint: WanTransformer(checkpoint.transformer),
    "transformer_2": lambda checkpoint: WanTransformer(checkpoint.transformer),
    "video_encoder": lambda checkpoint: VideoEncoder(checkpoint.vae),
    "video_decoder": lambda checkpoint: VideoDecoder(checkpoint.vae),
    "text_encoder": lambda checkpoint: build_text_encoder(checkpoint.text_encoder_config or {}),
    "image_encoder": lambda checkpoint: build_image_encoder(checkpoint.image_encoder_config or {}),
}
SAVE = {"diffusers": save_diffusers, "original": save_original}
CLIP_FILE = "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth"


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_constants(monkeypatch)


@cache
def built(variant: str) -> dict[str, Any]:
    return tiny_wan.build(variant)


def expected(variant: str, component: str) -> dict[str, torch.Tensor]:
    """What was written of a component, by our names."""
    modules = built(variant)
    if component in VAE_HALVES:
        return {n: t for n, t in modules["vae"].state_dict().items() if n.startswith(VAE_HALVES[component])}
    module = modules[component].encoder if component == "text_encoder" else modules[component]
    return dict(module.state_dict())


def load(checkpoint: WanCheckpoint, component: str, **options: Any) -> nn.Module:
    with torch.device("meta"):
        module = BUILD[component](checkpoint)
    with wan_source(checkpoint, component) as source:
        load_module(module, source, **{"device": "cpu", "dtype": torch.float32, **options})
    return module


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as raised:
        call()
    message = str(raised.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("layout", SAVE)
@pytest.mark.parametrize("variant", VARIANTS)
def test_both_layouts_load_to_the_written_tensors(variant: str, layout: str, tmp_path: Path) -> None:
    checkpoint = resolve_wan(str(SAVE[layout](tmp_path, variant)), allow_pickle=True)
    assert checkpoint.layout == layout
    components = [name for name in BUILD if name in checkpoint.files or name in VAE_HALVES]
    assert len(components) == len(built(variant)) + 1
    for component in components:
        state, written = load(checkpoint, component).state_dict(), expected(variant, component)
        assert state.keys() == written.keys()
        assert all(state[name].equal(tensor) for name, tensor in written.items()), component


def test_both_transformers_are_kept_apart(tmp_path: Path) -> None:
    for layout, save in SAVE.items():
        checkpoint = resolve_wan(str(save(tmp_path / layout, "t2v_a14b")), allow_pickle=True)
        one, two = (load(checkpoint, name).state_dict() for name in ("transformer", "transformer_2"))
        assert not one["proj_out.weight"].equal(two["proj_out.weight"])


def test_another_seed_gives_other_tensors(tmp_path: Path) -> None:
    checkpoint = resolve_wan(str(save_diffusers(tmp_path, "t2v_2_1", seed=1)))
    weight = load(checkpoint, "transformer").state_dict()["proj_out.weight"]
    assert not weight.equal(expected("t2v_2_1", "transformer")["proj_out.weight"])


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads what is mapped from /proc")
def test_pickles_stay_mapped_as_long_as_the_source_lives(tmp_path: Path) -> None:
    folder = save_original(tmp_path, "i2v_2_1")
    checkpoint = resolve_wan(str(folder), allow_pickle=True)
    for component in ("video_decoder", "text_encoder", "image_encoder"):
        path = checkpoint.files["vae" if component in VAE_HALVES else component]
        source = wan_source(checkpoint, component)
        source.close()
        assert str(path) in Path("/proc/self/maps").read_text()
        starts = [source.read(name).data_ptr() for name in source.names]
        assert starts == sorted(starts)
        assert source.total_bytes == sum(tensor.nbytes for tensor in expected("i2v_2_1", component).values())
        module = load(checkpoint, component)
        del source
        assert str(path) not in Path("/proc/self/maps").read_text()
        written = expected("i2v_2_1", component)
        assert all(tensor.equal(written[name]) for name, tensor in module.state_dict().items())


def test_pickles_of_the_old_format_load_as_well(tmp_path: Path) -> None:
    folder = save_original(tmp_path, "i2v_2_1")
    tensors = torch.load(folder / CLIP_FILE, weights_only=True)
    torch.save(tensors, folder / CLIP_FILE, _use_new_zipfile_serialization=False)
    state = load(resolve_wan(str(folder), allow_pickle=True), "image_encoder").state_dict()
    written = expected("i2v_2_1", "image_encoder")
    assert all(state[name].equal(tensor) for name, tensor in written.items())


@pytest.mark.parametrize("residual", ["fp32", "model"])
def test_chosen_parameters_stay_in_fp32(residual: Any, tmp_path: Path) -> None:
    checkpoint = resolve_wan(str(save_diffusers(tmp_path, "ti2v")))

    def keep(name: str) -> bool:
        return keeps_float32(name, residual)

    state = load(checkpoint, "transformer", dtype=torch.bfloat16, keep_float32=keep).state_dict()
    written = expected("ti2v", "transformer")
    kept = [name for name in state if keep(name)]
    assert 0 < len(kept) < len(state)
    for name, tensor in state.items():
        dtype = torch.float32 if name in kept else torch.bfloat16
        assert tensor.dtype == dtype, name
        assert tensor.equal(written[name].to(dtype)), name


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of a file in place."""
    safetensors = path.suffix == ".safetensors"
    tensors = load_file(path) if safetensors else torch.load(path, weights_only=True)
    change(tensors)
    if safetensors:
        save_file(tensors, path)
    else:
        torch.save(tensors, path)


def test_what_published_folders_hold_besides_is_left_out(tmp_path: Path) -> None:
    folder = save_diffusers(tmp_path, "i2v_2_1")
    norm = {f"blocks.{layer}.attn2.norm_added_q.weight": torch.ones(64) for layer in range(2)}
    rewrite(folder / "transformer" / "diffusion_pytorch_model.safetensors", lambda tensors: tensors.update(norm))
    embeddings = built("i2v_2_1")["text_encoder"].state_dict()["shared.weight"]
    both = {"shared.weight": embeddings.clone(), "encoder.embed_tokens.weight": embeddings.clone()}
    rewrite(folder / "text_encoder" / "model.safetensors", lambda tensors: tensors.update(both))

    def as_earlier_versions(tensors: dict[str, torch.Tensor]) -> None:
        moved = {f"vision_model.{name.removeprefix('vision_model.')}": tensor for name, tensor in tensors.items()}
        tensors.clear()
        tensors.update(moved | {"vision_model.embeddings.position_ids": torch.arange(17)[None]})

    rewrite(folder / "image_encoder" / "model.safetensors", as_earlier_versions)
    checkpoint = resolve_wan(str(folder))
    for component in ("transformer", "text_encoder", "image_encoder"):
        state, written = load(checkpoint, component).state_dict(), expected("i2v_2_1", component)
        assert state.keys() == written.keys()
        assert all(state[name].equal(tensor) for name, tensor in written.items())


def test_sharded_fp32_weights_load(tmp_path: Path) -> None:
    folder = save_diffusers(tmp_path, "ti2v")
    path = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    path.unlink()
    names = [f"diffusion_pytorch_model-0000{part}-of-00002.safetensors" for part in (1, 2)]
    index = {name: names[number % 2] for number, name in enumerate(sorted(tensors))}
    for file in names:
        save_file({name: tensor for name, tensor in tensors.items() if index[name] == file}, path.with_name(file))
    path.with_name(f"{path.name}.index.json").write_text(json.dumps({"weight_map": index}))
    state = load(resolve_wan(str(folder)), "transformer").state_dict()
    assert all(state[name].equal(tensor) for name, tensor in expected("ti2v", "transformer").items())


@pytest.mark.parametrize(
    ("layout", "component", "file", "name"),
    [
        ("original", "transformer", "diffusion_pytorch_model.safetensors", "vace_blocks.0.modulation"),
        ("original", "video_decoder", "Wan2.1_VAE.pth", "extra.weight"),
        ("original", "video_encoder", "Wan2.1_VAE.pth", "extra.weight"),
        ("original", "text_encoder", "models_t5_umt5-xxl-enc-bf16.pth", "decoder.norm.weight"),
        ("diffusers", "video_decoder", "vae/diffusion_pytorch_model.safetensors", "extra.weight"),
        ("diffusers", "video_encoder", "vae/diffusion_pytorch_model.safetensors", "encoders.weight"),
        ("diffusers", "text_encoder", "text_encoder/model.safetensors", "lm_head.weight"),
    ],
)
def test_tensors_of_no_component_are_refused(layout: str, component: str, file: str, name: str, tmp_path: Path) -> None:
    folder = SAVE[layout](tmp_path, "t2v_2_1")
    rewrite(folder / file, lambda tensors: tensors.update({name: torch.zeros(2)}))
    checkpoint = resolve_wan(str(folder), allow_pickle=True)
    part = "vae" if component in VAE_HALVES else component
    assert refusal(lambda: wan_source(checkpoint, component)) == (
        f"{folder / file} holds 1 unexpected ({name}); use the {part} of a released Wan model"
    )


def test_other_tensors_than_clip_s_are_refused(tmp_path: Path) -> None:
    folder = save_original(tmp_path, "i2v_2_1")
    rewrite(folder / CLIP_FILE, lambda tensors: tensors.update({"blocks.0.modulation": torch.zeros(1)}))
    message = refusal(lambda: wan_source(resolve_wan(str(folder), allow_pickle=True), "image_encoder"))
    assert message.startswith(f"{folder / CLIP_FILE}: the image encoder holds 'blocks.0.modulation'; use models_clip")


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = save_original(tmp_path, "ti2v")
    rewrite(folder / "Wan2.2_VAE.pth", lambda tensors: tensors.pop("decoder.head.2.bias"))
    checkpoint = resolve_wan(str(folder), allow_pickle=True)
    assert "does not fit VideoDecoder: 1 missing (decoder.conv_out.bias)" in refusal(
        lambda: load(checkpoint, "video_decoder")
    )
    load(checkpoint, "video_encoder")


@pytest.mark.parametrize("component", VAE_HALVES)
def test_a_renamed_vae_is_told_by_its_tensors(component: str, tmp_path: Path) -> None:
    folder = save_original(tmp_path / "ti2v", "ti2v")
    other = save_original(tmp_path / "t2v_2_1", "t2v_2_1")
    (other / "Wan2.1_VAE.pth").replace(folder / "Wan2.2_VAE.pth")
    checkpoint = resolve_wan(str(folder), allow_pickle=True)
    assert refusal(lambda: wan_source(checkpoint, component)) == (
        f"{folder / 'Wan2.2_VAE.pth'} holds the video VAE of Wan 2.1 with 16 latent channels; this model needs that of "
        f"Wan 2.2 with 48: use the VAE that came with the model"
    )


class _Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("harmful"),)


def test_a_pickle_cannot_run_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = save_original(tmp_path / "x", "t2v_2_1")
    file = folder / "Wan2.1_VAE.pth"
    torch.save({"a": torch.zeros(1), "b": _Harmful()}, file)
    checkpoint = resolve_wan(str(folder), allow_pickle=True)
    message = refusal(lambda: wan_source(checkpoint, "video_decoder"))
    assert message.startswith(f"{file} is damaged or holds more than tensors (Weights only load failed")
    assert not (tmp_path / "harmful").exists()
    file.write_bytes(pickle.dumps(_Harmful(), protocol=2))
    assert "is damaged or holds more than tensors" in refusal(lambda: wan_source(checkpoint, "video_decoder"))
    assert not (tmp_path / "harmful").exists()


def test_damaged_pickles_are_refused(tmp_path: Path) -> None:
    folder = save_original(tmp_path, "t2v_2_1")
    file = folder / "Wan2.1_VAE.pth"
    checkpoint = resolve_wan(str(folder), allow_pickle=True)
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    assert f"{file} is damaged or holds more than tensors (" in refusal(lambda: wan_source(checkpoint, "video_encoder"))
    for other in ([torch.zeros(1)], {"state_dict": {"a": torch.zeros(1)}}):
        torch.save(other, file)
        message = refusal(lambda: wan_source(checkpoint, "video_encoder"))
        assert message == f"{file} holds no plain dict of tensors; download it again"
