"""Loading: both layouts give identical tensors, anything less than a full match is an error, memory stays flat."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.architectures import architecture
from tests.tiny_ltx2 import (
    HIDDEN_SIZE,
    NUM_STATES,
    Version,
    build_upsampler,
    official_tensors,
    tiny_checkpoints,
    write_official_upsampler,
)
from vgen.checkpoint import (
    TensorSource,
    component_source,
    diffusers_component,
    load_module,
    official_component,
    upsampler_source,
)
from vgen.checkpoint_files import resolve, resolve_upsampler
from vgen.checkpoint_headers import CheckpointError, read_header
from vgen.models.ltx2 import keys
from vgen.models.ltx2.audio_encoder import AudioEncoder
from vgen.models.ltx2.audio_vae import AudioDecoder
from vgen.models.ltx2.bandwidth import BandwidthExtendedVocoder
from vgen.models.ltx2.config import LTX2Config
from vgen.models.ltx2.config_diffusers import from_diffusers
from vgen.models.ltx2.config_official import from_official
from vgen.models.ltx2.config_upsampler import upsampler_from_diffusers, upsampler_from_official
from vgen.models.ltx2.connectors import TextConnectors
from vgen.models.ltx2.transformer import LTX2Transformer
from vgen.models.ltx2.upsampler import LatentUpsampler
from vgen.models.ltx2.video_encoder import VideoEncoder
from vgen.models.ltx2.video_vae import VideoDecoder
from vgen.models.ltx2.vocoder import Vocoder


def build_connectors(config: LTX2Config, hidden_size: int, num_states: int) -> nn.Module:
    return TextConnectors(
        config.video_connector, config.audio_connector, hidden_size, num_states, config.text_projection
    )


MODULES: Mapping[str, Callable[[LTX2Config], nn.Module]] = {
    "transformer": lambda config: LTX2Transformer(config.transformer),
    "connectors": lambda config: build_connectors(config, HIDDEN_SIZE, NUM_STATES),
    "video_encoder": lambda config: VideoEncoder(config.video_encoder),
    "video_decoder": lambda config: VideoDecoder(config.video_decoder),
    "audio_encoder": lambda config: AudioEncoder(config.audio_encoder),
    "audio_decoder": lambda config: AudioDecoder(config.audio_decoder),
    "vocoder": lambda config: (
        BandwidthExtendedVocoder(config.vocoder, config.bandwidth_extension)
        if config.bandwidth_extension
        else Vocoder(config.vocoder)
    ),
}


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


class Stack(nn.Module):
    """Two linear layers and one buffer of each sort."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 2, bias=False)
        self.register_buffer("mean-of-means", torch.zeros(4))
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))


def stack_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"first.weight": (4, 3), "first.bias": (4,), "second.weight": (2, 4), "mean-of-means": (4,)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {**tensors, "steps": torch.tensor([7, 2**40 + 1])}


def source_of(tensors: Mapping[str, Tensor], path: Path) -> TensorSource:
    save_file(dict(tensors), path)
    return TensorSource.of([read_header(path)], lambda name: name)


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as raised:
        call()
    message = str(raised.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("version", ["2.0", "2.3"])
@pytest.mark.parametrize("component", MODULES)
def test_both_layouts_load_to_the_written_tensors(component: str, version: Version) -> None:
    tiny = tiny_checkpoints(version)
    official, diffusers = resolve(str(tiny.official)), resolve(str(tiny.diffusers))
    configs = from_official(official.config), from_diffusers(diffusers.config)
    loaded = []
    for checkpoint, config in zip((official, diffusers), configs, strict=True):
        module = on_meta(partial(MODULES[component], config))
        with component_source(checkpoint, component) as source:
            load_module(module, source, device="cpu", dtype=torch.float32)
        loaded.append(module.state_dict())
    assert loaded[0].keys() == loaded[1].keys()
    assert all(loaded[0][name].equal(loaded[1][name]) for name in loaded[0])

    written = official_tensors(tiny.parts)
    layouts = [(keys.OFFICIAL[component], "")] if component in keys.OFFICIAL else []
    layouts += [(keys.OFFICIAL[part], f"{child}.") for child, part in keys.CONNECTORS.items() if not layouts]
    checked = 0
    for layout, child in layouts:
        for file_prefix, ours in layout.prefixes.items():
            for name, tensor in written.items():
                our_name = child + ours + name[len(file_prefix) :]
                if name.startswith(file_prefix) and our_name in loaded[0]:
                    assert loaded[0][our_name].equal(tensor), name
                    checked += 1
    assert checked == len(loaded[0])


@pytest.mark.parametrize("options", [{}, {"rational": False}, {"scale": 1.5}, {"spatial": False, "temporal": True}])
def test_an_upsampler_loads_from_both_layouts(options: dict[str, Any], tmp_path: Path) -> None:
    written = build_upsampler(**options)
    write_official_upsampler(written, tmp_path / "x.safetensors")
    written.save_pretrained(tmp_path / "diffusers" / "latent_upsampler")
    for asked, parse in (("x.safetensors", upsampler_from_official), ("diffusers", upsampler_from_diffusers)):
        files = resolve_upsampler(str(tmp_path / asked))
        module = on_meta(lambda parse=parse, files=files: LatentUpsampler(parse(files.config)))  # type: ignore[misc]
        load_module(module, upsampler_source(files), device="cpu", dtype=torch.float32)
        expected = written.state_dict()
        assert module.state_dict().keys() == expected.keys()
        assert all(tensor.equal(expected[name]) for name, tensor in module.state_dict().items())


def test_the_parts_of_the_text_side_load_alone_as_well() -> None:
    checkpoint = resolve(str(tiny_checkpoints().diffusers))
    whole = on_meta(lambda: MODULES["connectors"](from_diffusers(checkpoint.config)))
    load_module(whole, component_source(checkpoint, "connectors"), device="cpu", dtype=torch.float32)
    for child, part in keys.CONNECTORS.items():
        alone = on_meta(lambda: MODULES["connectors"](from_diffusers(checkpoint.config))).get_submodule(child)
        load_module(alone, diffusers_component(checkpoint, part), device="cpu", dtype=torch.float32)
        expected = whole.get_submodule(child).state_dict()
        assert alone.state_dict().keys() == expected.keys()
        assert all(tensor.equal(expected[name]) for name, tensor in alone.state_dict().items())


RELEASED = {
    "ltx2": {
        "transformer": (3510, 18876.2),
        "text_embedding_projection": (1, 722.5),
        "video_embeddings_connector": (29, 354.5),
        "audio_embeddings_connector": (29, 354.5),
        "video_encoder": (94, 694.1),
        "video_decoder": (92, 528.4),
        "audio_encoder": (46, 21.3),
        "audio_decoder": (58, 31.9),
        "vocoder": (194, 55.6),
    },
    "ltx2_3": {
        "transformer": (4186, 18988.8),
        "text_embedding_projection": (4, 1156.1),
        "video_embeddings_connector": (129, 1612.5),
        "audio_embeddings_connector": (129, 403.6),
        "video_encoder": (86, 318.9),
        "video_decoder": (86, 407.2),
        "audio_encoder": (46, 21.3),
        "audio_decoder": (58, 31.9),
        "vocoder": (1227, 128.5),
    },
}
"""Tensors and million parameters of each part."""
TENSORS_IN_FILE = {"ltx2": 4052, "ltx2_3": 5947}
UNUSED_STATISTICS = {"ltx2": 3, "ltx2_3": 0}


@pytest.mark.parametrize("model", RELEASED)
def test_modules_of_full_size_have_as_many_tensors_as_the_released_file(model: str) -> None:
    config = architecture(model)
    full = {name: on_meta(partial(build, config)) for name, build in MODULES.items() if name != "connectors"}
    text = on_meta(lambda: build_connectors(config, 3840, 49))
    full |= {child: text.get_submodule(child) for child in keys.CONNECTORS}
    measured = {
        name: (len(module.state_dict()), round(sum(p.numel() for p in module.parameters()) / 1e6, 1))
        for name, module in full.items()
    }
    assert measured == RELEASED[model]
    # Encoders and decoders share two statistics in the file.
    in_file = sum(count for count, _ in measured.values()) - 2 * len(keys.STATISTICS) + UNUSED_STATISTICS[model]
    assert in_file == TENSORS_IN_FILE[model]


def test_loads_a_module_in_the_dtype_that_is_asked_for(tmp_path: Path) -> None:
    tensors = stack_tensors()
    module = on_meta(Stack)
    bytes_read: list[int] = []
    source = source_of(tensors, tmp_path / "x.safetensors")
    load_module(module, source, device="cpu", dtype=torch.bfloat16, progress=bytes_read.append)
    state = module.state_dict()
    for name, tensor in tensors.items():
        expected = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        assert state[name].dtype == expected.dtype, name
        assert state[name].equal(expected), name
    assert not any(parameter.requires_grad for parameter in module.parameters())
    assert sum(bytes_read) == source.total_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert len(bytes_read) == len(tensors)


def test_a_bf16_file_loads_exactly_into_fp32(tmp_path: Path) -> None:
    tensors = {n: t.to(torch.bfloat16) if t.is_floating_point() else t for n, t in stack_tensors().items()}
    module = on_meta(Stack)
    load_module(module, source_of(tensors, tmp_path / "x.safetensors"), device="cpu", dtype=torch.float32)
    assert module.get_parameter("first.weight").dtype == torch.float32
    assert module.get_parameter("first.weight").equal(tensors["first.weight"].float())


def test_loaded_tensors_do_not_depend_on_the_file(tmp_path: Path) -> None:
    path, tensors, module = tmp_path / "x.safetensors", stack_tensors(), on_meta(Stack)
    with source_of(tensors, path) as source:
        load_module(module, source, device="cpu", dtype=torch.float32)
        with path.open("r+b") as file:
            file.write(bytes(path.stat().st_size))
    assert all(module.state_dict()[name].equal(tensor) for name, tensor in tensors.items())


def test_tensors_come_from_several_files(tmp_path: Path) -> None:
    tensors = stack_tensors()
    halves = [{name: tensors[name] for name in list(tensors)[start::2]} for start in range(2)]
    headers = []
    for index, half in enumerate(halves):
        save_file(half, tmp_path / f"{index}.safetensors")
        headers.append(read_header(tmp_path / f"{index}.safetensors"))
    module = on_meta(Stack)
    load_module(module, TensorSource.of(headers, lambda name: name), device="cpu", dtype=torch.float32)
    assert all(module.state_dict()[name].equal(tensor) for name, tensor in tensors.items())
    assert "0.safetensors are both '" in refusal(lambda: TensorSource.of([*headers, headers[0]], lambda name: name))


def test_every_mismatch_is_in_one_error_and_nothing_is_loaded(tmp_path: Path) -> None:
    tensors = stack_tensors()
    del tensors["first.bias"]
    tensors["second.weight"] = tensors["second.weight"].T.contiguous()
    tensors |= {f"extra.{index}": torch.zeros(1) for index in range(6)}
    module = on_meta(Stack)
    source = source_of(tensors, tmp_path / "x.safetensors")
    message = refusal(lambda: load_module(module, source, device="cpu", dtype=torch.float32))
    assert message == (
        "the checkpoint does not fit Stack: 1 missing (first.bias); "
        "6 unexpected (extra.0, extra.1, extra.2, extra.3 and 2 more); "
        "1 misshapen (second.weight is [4, 2] and should be [2, 4]); use the checkpoint of this architecture"
    )
    assert all(tensor.is_meta for tensor in module.state_dict().values())


@pytest.mark.parametrize("kind", ["missing", "unexpected", "misshapen"])
def test_each_mismatch_alone_is_an_error(tmp_path: Path, kind: str) -> None:
    tensors = stack_tensors()
    if kind == "missing":
        del tensors["mean-of-means"]
    elif kind == "unexpected":
        tensors["second.bias"] = torch.zeros(2)
    else:
        tensors["first.bias"] = torch.zeros(4, 1)
    source = source_of(tensors, tmp_path / "x.safetensors")
    message = refusal(lambda: load_module(on_meta(Stack), source, device="cpu", dtype=torch.float32))
    assert f"Stack: 1 {kind} (" in message


def test_a_wrong_tensor_in_a_checkpoint_of_either_layout_is_named(tmp_path: Path) -> None:
    tiny = tiny_checkpoints()
    tensors = load_file(tiny.official)
    metadata = {"config": json.dumps(resolve(str(tiny.official)).config)}
    save_file({**tensors, "duration_head.linear.weight": torch.zeros(2)}, tmp_path / "a.safetensors", metadata)
    checkpoint = resolve(str(tmp_path / "a.safetensors"))
    for component in keys.COMPONENTS:
        message = refusal(partial(official_component, checkpoint, component))
        assert "holds 1 unexpected (duration_head.linear.weight)" in message

    del tensors["model.diffusion_model.transformer_blocks.1.attn1.q_norm.weight"]
    save_file(tensors, tmp_path / "b.safetensors", metadata)
    checkpoint = resolve(str(tmp_path / "b.safetensors"))
    module = on_meta(lambda: MODULES["transformer"](from_official(checkpoint.config)))
    source = official_component(checkpoint, "transformer")
    assert "LTX2Transformer: 1 missing (transformer_blocks.1.attn1.q_norm.weight);" in refusal(
        lambda: load_module(module, source, device="cpu", dtype=torch.float32)
    )

    folder = tmp_path / "diffusers"
    for path in tiny.diffusers.rglob("*"):
        if path.is_file():
            (folder / path.relative_to(tiny.diffusers)).parent.mkdir(parents=True, exist_ok=True)
            (folder / path.relative_to(tiny.diffusers)).write_bytes(path.read_bytes())
    connectors = folder / "connectors" / "diffusion_pytorch_model.safetensors"
    save_file({**load_file(connectors), "duration_head.weight": torch.zeros(2)}, connectors)
    assert "holds 1 unexpected (duration_head.weight)" in refusal(
        lambda: component_source(resolve(str(folder)), "connectors")
    )


def test_buffers_that_no_file_has_are_kept_and_moved(tmp_path: Path) -> None:
    class WithTable(Stack):
        def __init__(self, device: str) -> None:
            super().__init__()
            self.register_buffer("table", torch.arange(3.0, device=device, dtype=torch.float64), persistent=False)

    source = source_of(stack_tensors(), tmp_path / "x.safetensors")
    module: Any = on_meta(lambda: WithTable("cpu"))
    load_module(module, source, device="cpu", dtype=torch.bfloat16)
    assert module.table.equal(torch.arange(3.0, dtype=torch.float64))
    assert "WithTable has 1 tensors without values (table)" in refusal(
        lambda: load_module(on_meta(lambda: WithTable("meta")), source, device="cpu", dtype=torch.float32)
    )


_MEASURE = """
import json, sys, threading, time
from pathlib import Path
import torch
from torch import nn
from vgen.checkpoint import TensorSource, load_module
from vgen.checkpoint_headers import read_header

def anonymous_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

class Hoarder(TensorSource):
    kept = []
    def read(self, name):
        self.kept.append(super().read(name).clone())
        return self.kept[-1]

path, dtype, kind = sys.argv[1:]
torch.set_num_threads(1)
with torch.device("meta"):
    module = nn.ModuleList(nn.Linear(1024, 4096, bias=False) for _ in range(8))
source = (Hoarder if kind == "hoarder" else TensorSource).of([read_header(Path(path))], lambda name: name)
before, peak, done = anonymous_bytes(), 0, False

def watch():
    global peak
    while not done:
        peak = max(peak, anonymous_bytes())
        time.sleep(0.0002)

thread = threading.Thread(target=watch)
thread.start()
load_module(module, source, device="cpu", dtype=getattr(torch, dtype))
done = True
thread.join()
print(json.dumps([peak - before, sum(p.nbytes for p in module.parameters())]))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory of the process from /proc")
def test_a_load_takes_no_host_memory_beyond_the_module(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({f"{index}.weight": torch.full((4096, 1024), float(index)) for index in range(8)}, path)
    largest = 4096 * 1024 * 4

    def beyond_the_module(dtype: str, kind: str) -> int:
        command = [sys.executable, "-c", _MEASURE, str(path), dtype, kind]
        peak, module = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        return int(peak - module)

    for dtype in ("float32", "bfloat16"):
        assert beyond_the_module(dtype, "plain") < 2 * largest
    assert beyond_the_module("float32", "hoarder") > 4 * largest, "the measurement sees nothing"
