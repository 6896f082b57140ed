"""Packed checkpoints: what GPTQ, AWQ and compressed-tensors write is read as its numbers, or refused in one line."""

import gc
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specbuild.builder.config.scheme import parse
from specbuild.builder.frontend.checkpoint import find, load
from specbuild.builder.frontend.layer_by_layer import LayeredModel
from specbuild.builder.frontend.packed import Packed
from specbuild.builder.quantize.grids import own_grids
from specbuild.builder.quantize.linears import Names
from specbuild.runtime.errors import CheckpointError

GROUP = 32
FORMATS = ("gptq 4", "gptq 8", "gptq_v2 2", "gptq in any order", "awq", "pack-quantized", "asymmetric", "int-quantized")

pytestmark = pytest.mark.usefixtures("temporary")


def words(codes, bits, dim, order=None):
    """Codes in words of 32 bits along a dimension; `order[i]`: which of a word's codes has the i-th lowest bits."""
    several = codes.movedim(dim, -1).reshape(-1, 32 // bits).tolist()
    packed = [sum(int(row[at]) << bits * i for i, at in enumerate(order or range(32 // bits))) for row in several]
    signed = torch.tensor([word - (1 << 32) if word >> 31 else word for word in packed], dtype=torch.int32)
    shape = list(codes.movedim(dim, -1).shape)
    return signed.reshape(*shape[:-1], shape[-1] * bits // 32).movedim(-1, dim).contiguous()


def numbers(weight, bits, symmetric, shuffled=False):
    """Random ones of a weight's shape."""
    n, k = weight.shape
    random = torch.Generator().manual_seed(n + k)
    codes = torch.randint(0, 1 << bits, (n, k), generator=random)
    zeros = torch.randint(1, 1 << bits, (n, k // GROUP), generator=random)
    scales = (torch.rand((n, k // GROUP), generator=random) / (1 << bits) + 1e-3).half()
    groups = torch.arange(k) // GROUP
    groups = groups[torch.randperm(k, generator=random)] if shuffled else groups
    return codes, torch.full_like(zeros, 1 << bits - 1) if symmetric else zeros, scales, groups


def pack(tiny, folder, kind):
    """The checkpoint with all products of its layers packed, and their weights as they are meant."""
    shutil.copytree(tiny, folder)
    tensors, meant = load_file(tiny / "model.safetensors"), dict[str, Tensor]()
    bits = int(kind[-1]) if kind[-1].isdigit() else 8 if kind == "int-quantized" else 4
    symmetric = kind in ("pack-quantized", "int-quantized")
    for name in [name for name in tensors if "_proj" in name]:
        codes, zeros, scales, groups = numbers(tensors.pop(name), bits, symmetric, "order" in kind)
        meant[name] = (codes - zeros[:, groups]).float() * scales.float()[:, groups]
        prefix, middle = name.removesuffix(".weight"), 1 << bits - 1
        parts = {}
        if kind.startswith("gptq"):
            less = zeros if "v2" in kind else zeros - 1
            parts |= {"qweight": words(codes.T, bits, 0), "qzeros": words(less.T, bits, 1), "scales": scales.T}
            parts |= {"g_idx": groups.int()}
        elif kind == "awq":
            order = (0, 2, 4, 6, 1, 3, 5, 7)
            parts |= {"qweight": words(codes.T, 4, 1, order), "qzeros": words(zeros.T, 4, 1, order), "scales": scales.T}
        elif kind == "int-quantized":
            parts |= {"weight": (codes - middle).to(torch.int8), "weight_scale": scales}
        else:
            parts |= {"weight_packed": words(codes, 4, 1), "weight_scale": scales}
            parts |= {"weight_shape": torch.tensor(codes.shape)}
            parts |= {} if symmetric else {"weight_zero_point": words(zeros, 4, 0)}
        tensors |= {f"{prefix}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    change(folder, asked(kind, bits, symmetric))
    return meant


def asked(kind, bits, symmetric):
    """What a configuration says of it."""
    if kind.startswith("gptq"):
        version = "gptq_v2" if "v2" in kind else "gptq"
        return {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "checkpoint_format": version}
    if kind == "awq":
        return {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
    weights = {"num_bits": bits, "group_size": GROUP, "symmetric": symmetric, "type": "int"}
    form = "int-quantized" if kind == "int-quantized" else "pack-quantized"
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": {"weights": weights}}}


def change(folder, packed):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": packed}))


@pytest.mark.slow(but=("gptq 4", "asymmetric"))
@pytest.mark.parametrize("kind", FORMATS)
def test_a_packed_checkpoint_is_the_one_that_is_meant(kind, tiny, tmp_path, temporary):
    meant = pack(tiny, tmp_path / "packed", kind)
    found, original = find(str(tmp_path / "packed")), find(str(tiny))
    assert isinstance(found.origin, Packed)
    assert found.origin.to_dict()["packed_weights"] == len(meant)
    assert found.sha256() == found.origin.sha256 != original.sha256()
    assert found.tokenizer("def f(x):")["input_ids"] == original.tokenizer("def f(x):")["input_ids"]
    model = load(found, "sdpa")
    got = dict(model.state_dict())
    assert all(torch.equal(got[name], weight) for name, weight in meant.items())
    others = load(original, "sdpa").state_dict()
    assert all(torch.equal(weight, others[name]) for name, weight in got.items() if name not in meant)
    scheme = parse("int8" if kind[-1] == "8" or kind == "int-quantized" else "int4", "onnxruntime")
    schemes = {name.removesuffix(".weight"): scheme for name in meant}
    grids = own_grids(LayeredModel.of(model), Names.of(model), schemes)
    assert set(grids) == set(schemes) or "order" in kind
    del found, model
    assert not list(temporary.iterdir())


def with_tensor(folder, part, make):
    """Change one packed weight's part."""
    tensors = load_file(folder / "model.safetensors")
    name = sorted(name for name in tensors if name.endswith(f".{part}"))[0]
    made = make(tensors.pop(name))
    save_file(tensors | ({} if made is None else {name: made.contiguous()}), folder / "model.safetensors")


BAD = {
    "3 bits": ("gptq 4", lambda folder: change(folder, asked("gptq", 3, False)), "2, 4 or 8 can be read"),
    "another layout": ("awq", lambda folder: change(folder, asked("awq", 4, False) | {"version": "gemv"}), "GEMM's"),
    "nothing packed": ("awq", lambda folder: change(folder, asked("pack-quantized", 4, True)), "has no weight_packed"),
    "other words": ("gptq 4", lambda f: with_tensor(f, "qweight", lambda t: t.long()), "packed wrongly .words of"),
    "no scales": ("gptq 4", lambda f: with_tensor(f, "scales", lambda t: None), "packed wrongly .*scales"),
    "a negative group": ("gptq 4", lambda f: with_tensor(f, "g_idx", lambda t: t - 99), "columns of no group"),
    "NaN": ("awq", lambda f: with_tensor(f, "scales", lambda t: t * float("nan")), "NaN or infinite"),
}


@pytest.mark.slow
@pytest.mark.nightly(but=("3 bits", "no scales"))
@pytest.mark.parametrize("case", BAD)
def test_what_is_refused(case, tiny, tmp_path, temporary):
    kind, spoil, message = BAD[case]
    pack(tiny, tmp_path / "packed", kind)
    spoil(tmp_path / "packed")
    with pytest.raises(CheckpointError, match=message) as error:
        load(find(str(tmp_path / "packed")), "sdpa")
    assert "\n" not in str(error.value)
    del error  # its traceback has what was found
    gc.collect()
    assert not list(temporary.iterdir())


def test_what_is_unknown_is_left_to_transformers(tiny, tmp_path):
    shutil.copytree(tiny, tmp_path / "other")
    change(tmp_path / "other", {"quant_method": "compressed-tensors", "format": "float-quantized"})
    with pytest.raises(CheckpointError):
        load(find(str(tmp_path / "other")), "sdpa")
