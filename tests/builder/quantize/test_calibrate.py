"""Calibration layer by layer: what each layer sees, that an interrupted one goes on, and how little it holds."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from small_models import random_model, random_texts
from torch import Tensor

from specbuild.builder.config.scheme import Scheme
from specbuild.builder.frontend.hidden_state_taps import decoder_layers
from specbuild.builder.frontend.reference import text_logits
from specbuild.builder.quantize import calibrate as module
from specbuild.builder.quantize.calibrate import Found, Keep, calibrate
from specbuild.builder.quantize.linears import Names, no_grad, rows, simulated
from specbuild.builder.quantize.numbers import Inputs, Quantized, quantize
from specbuild.runtime.errors import OptionError, OutputError

GPTQ = Scheme("int4", "fp32", 32, symmetric=False, method="gptq", activations="dynamic")
AWQ = Scheme("int4", "fp32", 32, method="awq")
STATIC = Scheme("int8", "fp32", activations="static")
RTN = Scheme("int4", "fp32", 32)
FLOAT = Scheme("fp32", "fp32")
TEXTS = random_texts()
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "gpt2": ("gpt2", {}),
    "opt": ("opt", {}),
    "windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "gemma3": ("gemma3_text", {"sliding_window": 6, "query_pre_attn_scalar": 16, "head_dim": 16}),
    "tuples": ("gptj", {"num_hidden_layers": 5}),
}


def family(name: str) -> Any:
    kind, fields = FAMILIES[name]
    return random_model(kind, **fields)


def inside(model: Any, scheme: Scheme) -> dict[str, Scheme]:
    names = Names.of(model)
    return {name: scheme for name in names.weights if name not in (names.head, names.embedding)}


def same(a: Mapping[str, Quantized], b: Mapping[str, Quantized]) -> bool:
    """Bit for bit, whatever the order."""

    def equal(x: Any, y: Any) -> bool:
        if not isinstance(x, Tensor) or not isinstance(y, Tensor):
            return bool(x == y)
        return x.dtype == y.dtype and torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))

    names = [each.name for each in fields(Quantized)]
    return a.keys() == b.keys() and all(equal(getattr(a[n], f), getattr(b[n], f)) for n in a for f in names)


def whole_model_inputs(model: Any, names: list[str], found: Found) -> dict[str, Inputs]:
    """What some products see when all of the model runs, quantized as far as it was found."""
    seen: dict[str, list[Tensor]] = {name: [] for name in names}
    for name in names:
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, x, name=name: seen[name].append(x[0].flatten(0, -2))
        )
    with simulated(model, found):
        for text in TEXTS:
            text_logits(model, text)
    inputs = {name: torch.cat(each[-len(TEXTS) :]) for name, each in seen.items()}
    return {name: Inputs(x.abs().amax(0), [x.T @ x]) for name, x in inputs.items()}


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> dict[str, Inputs]:
    """What `quantize` is told of each weight's inputs."""
    told: dict[str, Inputs] = {}
    real = module.quantize

    def note(weights: dict[str, Tensor], scheme: Scheme, inputs: Inputs | None = None) -> Found:
        if inputs is not None:
            told.update(dict.fromkeys(weights, inputs))
        return real(weights, scheme, inputs)

    monkeypatch.setattr(module, "quantize", note)
    return told


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_see_what_the_quantized_layers_before_them_make(name: str, noted: dict[str, Inputs]) -> None:
    model = family(name)
    schemes = inside(model, GPTQ)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    found = calibrate(model, schemes, TEXTS)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert sorted(found) == sorted(schemes)
    done = Found()
    for layer in decoder_layers(model):
        modules = {id(each) for each in layer.modules()}
        names = [each for each in schemes if id(model.get_submodule(each)) in modules]
        assert names
        for each, expected in whole_model_inputs(model, names, done).items():
            torch.testing.assert_close(noted[each].largest, expected.largest, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(noted[each].moments[0], expected.moments[0], rtol=1e-4, atol=1e-3)
        done |= {each: found[each] for each in names}


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_the_head_sees_what_all_layers_make(name: str, noted: dict[str, Inputs]) -> None:
    model = family(name)
    found = calibrate(model, inside(model, GPTQ) | {"lm_head": GPTQ}, TEXTS)
    assert found.pop("lm_head").codes.shape == (97, 2, 32)
    expected = whole_model_inputs(model, ["lm_head"], found)["lm_head"]
    torch.testing.assert_close(noted["lm_head"].moments[0], expected.moments[0], rtol=1e-4, atol=1e-3)


def test_layers_that_are_not_one_list_see_the_model_as_it_is(noted: dict[str, Inputs]) -> None:
    model = family("llama")
    count, model.config.num_hidden_layers = model.config.num_hidden_layers, 7
    schemes = inside(model, GPTQ)
    assert sorted(calibrate(model, schemes, TEXTS)) == sorted(schemes)
    model.config.num_hidden_layers = count
    for each, expected in whole_model_inputs(model, list(schemes), Found()).items():
        assert torch.equal(noted[each].largest, expected.largest)


def test_every_weight_by_its_own_scheme() -> None:
    model = family("llama")
    names = [f"model.layers.1.{each}" for each in ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "self_attn.o_proj")]
    schemes = dict(zip(names, (GPTQ, STATIC, RTN, FLOAT), strict=True)) | {"model.embed_tokens": RTN}
    found = calibrate(model, schemes, TEXTS)
    assert {name: each.scheme for name, each in found.items()} == {n: s for n, s in schemes.items() if s is not FLOAT}
    expected = quantize({"w": rows(model.get_submodule(names[2]))}, RTN)["w"]
    assert torch.equal(found[names[2]].codes, expected.codes)
    assert calibrate(model, {names[2]: RTN}, []).keys() == {names[2]}, "what is not calibrated needs no texts"


@pytest.mark.parametrize(("width", "block"), [(88, None), (80, 16)])
def test_rows_without_a_fitting_block_are_left_out(width: int, block: int | None) -> None:
    model = random_model("llama", intermediate_size=width, num_hidden_layers=1)
    found = calibrate(model, inside(model, GPTQ), TEXTS)
    assert "model.layers.0.mlp.up_proj" in found
    narrow = found.get("model.layers.0.mlp.down_proj")
    assert (narrow and narrow.scheme.block) == block


def test_a_product_that_no_text_reaches_is_refused() -> None:
    model = family("llama")
    model.model.layers[1].mlp.spare = torch.nn.Linear(64, 64)
    with pytest.raises(OptionError, match=r"no text reaches model\.layers\.1\.mlp\.spare, so it cannot be calibrated"):
        calibrate(model, inside(model, GPTQ), TEXTS)
    assert not any("forward" in each.__dict__ for each in decoder_layers(model))


def count_quantized(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []
    real = module.quantize
    monkeypatch.setattr(module, "quantize", lambda weights, *args: seen.extend(weights) or real(weights, *args))
    return seen


@pytest.mark.parametrize("scheme", [GPTQ, Scheme("fp8", "fp16", activations="static")], ids=["gptq", "fp8"])
def test_an_interrupted_calibration_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scheme: Scheme) -> None:
    model = family("llama")
    schemes = inside(model, scheme) | {"lm_head": scheme}
    expected = calibrate(model, schemes, TEXTS)
    keep, told = Keep(tmp_path, "model", "texts"), list[tuple[str, float]]()

    def interrupted(phase: str, share: float) -> None:
        told.append((phase, share))
        if share > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(model, schemes, TEXTS, keep, interrupted)
    assert told == [("layers", 0.0), ("layers", 1 / 3), ("layers", 2 / 3)]
    assert sorted(path.name for path in keep.folder.iterdir()) == ["layer0.safetensors", "layer1.safetensors"]
    done = count_quantized(monkeypatch)
    found = calibrate(model, schemes, TEXTS, keep)
    assert same(found, expected)
    assert list(found) == list(expected)
    assert {name.split(".")[2] for name in done if name != "lm_head"} == {"2"}
    done.clear()
    assert same(calibrate(model, schemes, TEXTS, keep), expected)
    assert set(done) == {"lm_head"}


@pytest.mark.parametrize(
    "other", [("model", "texts", {"a": "int8"}), ("model", "texts", {"b": "int4"}), ("model", "other", {"a": "int4"})]
)
def test_only_the_same_is_reused(tmp_path: Path, other: tuple[Any, ...]) -> None:
    model, identity = random_model("llama", num_hidden_layers=1), ("model", "texts", {"a": "int4"})
    calibrate(model, inside(model, GPTQ), TEXTS, Keep(tmp_path, *identity))
    names = list(inside(model, GPTQ))
    assert Keep(tmp_path, *identity).load(0, names[::-1]) is not None
    assert Keep(tmp_path, *other).load(0, names) is None


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-200] ^= 255
    path.write_bytes(bytes(content))


def rewrite(change: Callable[[dict[str, Tensor], dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
            said = json.loads(file.metadata()["specbuild"])
        said = change(tensors, said) or said
        save_file(tensors, path, metadata={"specbuild": json.dumps(said)})

    return damage


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "cut": cut,
    "one byte": flip,
    "empty": lambda path: path.write_bytes(b""),
    "nothing said": lambda path: save_file({"a": torch.zeros(1)}, path),
    "a tensor less": rewrite(lambda tensors, said: tensors.pop(max(tensors)) is None),
    "something else said": rewrite(lambda tensors, said: list(said)),
    "another scheme": rewrite(lambda tensors, said: {name: [{"kind": "int9"}, None] for name in said}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_made_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damage: str) -> None:
    model, keep = random_model("llama", num_hidden_layers=2), Keep(tmp_path, "model")
    expected = calibrate(model, inside(model, GPTQ), TEXTS, keep)
    DAMAGES[damage](keep.folder / "layer1.safetensors")
    done = count_quantized(monkeypatch)
    assert same(calibrate(model, inside(model, GPTQ), TEXTS, keep), expected)
    assert {name.split(".")[2] for name in done} == {"1"}
    done.clear()
    assert same(calibrate(model, inside(model, GPTQ), TEXTS, keep), expected)
    assert not done


@pytest.mark.parametrize("place", ["file", "folder in the way"])
def test_what_cannot_be_kept_is_refused(tmp_path: Path, place: str) -> None:
    model, keep = random_model("llama", num_hidden_layers=1), Keep(tmp_path / "cache", "model")
    if place == "file":
        (tmp_path / "cache").touch()
    else:
        (keep.folder / "layer0.safetensors").mkdir(parents=True)
    with pytest.raises(OutputError, match="cannot keep what was calibrated") as caught:
        calibrate(model, inside(model, GPTQ), TEXTS, keep)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("layers", [2, 6])
def test_only_one_layers_states_and_statistics_are_held(monkeypatch: pytest.MonkeyPatch, layers: int) -> None:
    model = random_model("llama", num_hidden_layers=layers)
    moments, states = list[weakref.ref[Tensor]](), list[weakref.ref[Tensor]]()
    most, real = {"moments": 0, "states": 0}, module.quantize

    def alive(each: list[weakref.ref[Tensor]]) -> int:
        return len({id(found) for ref in each if (found := ref()) is not None})

    def note(weights: dict[str, Tensor], scheme: Scheme, inputs: Inputs | None = None) -> Found:
        assert inputs is not None
        moments.append(weakref.ref(inputs.moments[0]))
        most["moments"] = max(most["moments"], alive(moments))
        return real(weights, scheme, inputs)

    def watch(_module: Any, _inputs: Any, output: Any) -> None:
        states.append(weakref.ref(output if isinstance(output, Tensor) else output[0]))
        most["states"] = max(most["states"], alive(states))

    monkeypatch.setattr(module, "quantize", note)
    for layer in decoder_layers(model):
        layer.register_forward_hook(watch)
    with no_grad(model):
        calibrate(model, inside(model, GPTQ), TEXTS)
    assert most["moments"] == 4  # q, k and v read one tensor; gate and up another
    assert 0 < most["states"] <= 3 * len(TEXTS)  # what goes in, what came out, and what came out before quantizing
    assert (alive(moments), alive(states)) == (0, 0)
