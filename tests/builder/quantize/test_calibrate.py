"""Calibration layer by layer: what each layer sees, that an interrupted one goes on, and how little it holds."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, fields, replace

import pytest
import torch
from safetensors.torch import save_file
from small_models import holding, random_model, random_texts, rows
from torch import Tensor

from specbuild.builder.config.scheme import Scheme
from specbuild.builder.frontend.checkpoint import find, load
from specbuild.builder.frontend.hidden_state_taps import decoder_layers
from specbuild.builder.frontend.layer_by_layer import LayeredModel
from specbuild.builder.frontend.lazy_weights import ALL, Weight, of_names, skeleton
from specbuild.builder.frontend.reference import text_logits
from specbuild.builder.quantize.calibrate import CalibrationCache, calibrate
from specbuild.builder.quantize.linears import Names, simulated
from specbuild.builder.quantize.numbers import Inputs, Numbers, Quantized, quantize
from specbuild.runtime.errors import OptionError, OutputError

GPTQ = Scheme("int4", "fp32", 32, symmetric=False, method="gptq", activations="dynamic")
STATIC = Scheme("int8", "fp32", activations="static")
RTN = Scheme("int4", "fp32", 32)
TEXTS = random_texts()
of = LayeredModel.of
FAMILIES = {
    "llama": ("llama", {}),
    "gpt2": ("gpt2", {}),
    "windows": ("gemma3_text", {"sliding_window": 6, "query_pre_attn_scalar": 16, "head_dim": 16}),
    "tuples": ("gptj", {"num_hidden_layers": 5}),
}


def inside(model, scheme):
    names = Names.of(model)
    return {name: scheme for name in names.weights if name not in (names.head, names.embedding)}


def expected(model, name, scheme, inputs=None):
    return quantize({name: rows(model.get_submodule(name))}, scheme, inputs)[name]


def alike(a, b):
    """But for codes that the order of a sum turns; other inputs turn every eighth."""
    return bool((a.whole().codes != b.codes).float().mean() < 0.01)


def same(a, b):
    """Bit for bit, whatever the order."""

    def content(each):
        parts = [getattr(each.whole(), field.name) for field in fields(Quantized)]
        return [(x.dtype, x.flatten().view(torch.uint8).tolist()) if isinstance(x, Tensor) else x for x in parts]

    return a.keys() == b.keys() and all(content(a[name]) == content(b[name]) for name in a)


def whole_model_inputs(model, names, found):
    """What some products see when all of the model runs, quantized as far as it was found."""
    seen = {name: [] for name in names}
    for name in names:
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, x, name=name: seen[name].append(x[0].flatten(0, -2))
        )
    with holding(model, found):
        for text in TEXTS:
            text_logits(model, text)
    inputs = {name: torch.cat(each[-len(TEXTS) :]) for name, each in seen.items()}
    return {name: Inputs(x.abs().amax(0), [x.T @ x]) for name, x in inputs.items()}


@pytest.mark.slow(but=("llama",))
@pytest.mark.parametrize("name", FAMILIES)
def test_layers_see_what_the_quantized_layers_before_them_make(name):
    """And the head what all of them make: each weight is as GPTQ rounds it with the inputs of the whole model."""
    kind, fields = FAMILIES[name]
    model = random_model(kind, **fields)
    schemes = inside(model, GPTQ) | {"lm_head": GPTQ}
    before = {key: value.clone() for key, value in model.state_dict().items()}
    found = calibrate(of(model), schemes, TEXTS)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert sorted(found) == sorted(schemes)
    done = dict[str, Numbers]()
    for part in (*decoder_layers(model), model.lm_head):
        modules = {id(each) for each in part.modules()}
        names = [each for each in schemes if id(model.get_submodule(each)) in modules]
        assert names
        for each, inputs in whole_model_inputs(model, names, done).items():
            assert alike(found[each], expected(model, each, GPTQ, inputs))
        done |= {each: found[each] for each in names}


@pytest.mark.slow
def test_layers_that_are_not_one_list_see_the_model_as_it_is():
    model = random_model("llama")
    count, model.config.num_hidden_layers = model.config.num_hidden_layers, 7
    schemes = inside(model, GPTQ)
    found = calibrate(of(model), schemes, TEXTS)
    model.config.num_hidden_layers = count
    for each, inputs in whole_model_inputs(model, list(schemes), {}).items():
        assert alike(found[each], expected(model, each, GPTQ, inputs))


def test_every_weight_by_its_own_scheme():
    model = random_model("llama")
    names = [f"model.layers.1.{each}" for each in ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "self_attn.o_proj")]
    schemes = dict(zip(names, (GPTQ, STATIC, RTN, Scheme("fp32", "fp32")), strict=True)) | {"model.embed_tokens": RTN}
    found = calibrate(of(model), schemes, TEXTS)
    assert {name: each.scheme for name, each in found.items()} == {n: s for n, s in schemes.items() if s.quantized}
    assert torch.equal(found[names[2]].whole().codes, expected(model, names[2], RTN).codes)
    assert calibrate(of(model), {names[2]: RTN}, []).keys() == {names[2]}, "what is not calibrated needs no texts"


@pytest.mark.parametrize(("width", "block"), [(88, None), (80, 16)])
def test_rows_without_a_fitting_block_are_left_out(width, block):
    model = random_model("llama", intermediate_size=width, num_hidden_layers=1)
    found = calibrate(of(model), inside(model, GPTQ), TEXTS)
    assert "model.layers.0.mlp.up_proj" in found
    narrow = found.get("model.layers.0.mlp.down_proj")
    assert (narrow and narrow.scheme.block) == block


def test_a_product_that_no_text_reaches_is_refused():
    model = random_model("llama")
    model.model.layers[1].mlp.spare = torch.nn.Linear(64, 64)
    with pytest.raises(OptionError, match=r"no text reaches model\.layers\.1\.mlp\.spare, so it cannot be calibrated"):
        calibrate(of(model), inside(model, GPTQ), TEXTS)
    assert not any("forward" in each.__dict__ for each in decoder_layers(model))


def times(cache):
    """When each layer was written."""
    return {path.stem: path.stat().st_mtime_ns for path in cache.folder.iterdir()}


@pytest.mark.slow(only=("gptq",))
@pytest.mark.parametrize("scheme", [GPTQ, Scheme("fp8", "fp16", activations="static")], ids=["gptq", "fp8"])
def test_an_interrupted_calibration_goes_on(tmp_path, scheme):
    model = random_model("llama")
    schemes = inside(model, scheme) | {"lm_head": scheme}
    exact = calibrate(of(model), schemes, TEXTS)
    cache, shares = CalibrationCache(tmp_path, "model", "texts"), list[float]()

    def interrupted(phase, share):
        shares.append(share)
        if share > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(of(model), schemes, TEXTS, cache, interrupted)
    assert shares == [0.0, 1 / 3, 2 / 3]
    first = times(cache)
    assert sorted(first) == ["layer0", "layer1"]
    for _ in range(2):
        found = calibrate(of(model), schemes, TEXTS, cache)
        assert same(found, exact)
        assert list(found) == list(exact)
        assert times(cache).items() > first.items()


@pytest.mark.parametrize(
    "other", [("model", "texts", {"a": "int8"}), ("model", "texts", {"b": "int4"}), ("model", "other", {"a": "int4"})]
)
def test_only_the_same_is_reused(tmp_path, other):
    cache = CalibrationCache(tmp_path, "model", "texts", {"a": "int4"})
    cache.save("layer0", quantize({"a": torch.ones(2, 32), "b": torch.ones(2, 32)}, RTN))
    assert cache.load("layer0", ["b", "a"])
    assert cache.load("layer0", ["a"]) is None
    assert CalibrationCache(tmp_path, *other).load("layer0", ["a", "b"]) is None


def test_a_file_that_is_gone_is_said(tmp_path):
    cache = CalibrationCache(tmp_path, "model")
    found = cache.save("layer0", quantize({"a": torch.ones(2, 32)}, RTN))
    (cache.folder / "layer0.safetensors").unlink()
    with pytest.raises(OutputError, match=r"layer0.safetensors is gone .*: leave it alone, and begin again$"):
        found["a"].whole()


def flip(path):
    content = bytearray(path.read_bytes())
    content[-200] ^= 255
    path.write_bytes(bytes(content))


DAMAGES = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "one byte": flip,
    "nothing said": lambda path: save_file({"a": torch.zeros(1)}, path),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_made_again(tmp_path, damage):
    model, cache = random_model("llama", num_hidden_layers=2), CalibrationCache(tmp_path, "model")
    exact = calibrate(of(model), inside(model, GPTQ), TEXTS, cache)
    DAMAGES[damage](cache.folder / "layer1.safetensors")
    before = times(cache)
    assert same(calibrate(of(model), inside(model, GPTQ), TEXTS, cache), exact)
    assert {name for name, time in times(cache).items() if time != before[name]} == {"layer1"}
    assert cache.load("layer1", [name for name in exact if "layers.1" in name])


@pytest.mark.parametrize("place", ["cache", "cache/{}/layer0.safetensors/folder"])
def test_what_cannot_be_kept_is_refused(tmp_path, place):
    cache = CalibrationCache(tmp_path / "cache", "model")
    path = tmp_path / place.format(cache.folder.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    with pytest.raises(OutputError, match=r"cannot keep what was calibrated .*--calibration-cache$"):
        cache.save("layer0", quantize({"a": torch.ones(2, 32)}, RTN))


@dataclass(frozen=True, eq=False)
class Counted(Weight):
    """A weight that tells how many numbers of all such weights are in memory when it is read."""

    whole: Weight
    alive: list[weakref.ref[Tensor]]
    peaks: list[int]

    @property
    def shape(self):
        return self.whole.shape

    def read(self, rows=ALL):
        found = self.whole.read(rows).clone()
        self.alive.append(weakref.ref(found))
        self.peaks.append(sum(each.numel() for ref in self.alive if (each := ref()) is not None))
        return found


@pytest.mark.parametrize("texts", [TEXTS, []], ids=["calibrated", "rounded"])
def test_one_layers_weights_are_in_memory_at_a_time(tmp_path, texts):
    model, alive, peaks = of(random_model("llama", num_hidden_layers=6)), [], list[int]()
    counted = replace(model, weights={name: Counted(each, alive, peaks) for name, each in model.weights.items()})
    schemes = inside(model.net, GPTQ if texts else RTN)
    found = calibrate(counted, schemes, texts, CalibrationCache(tmp_path, "model"))
    assert bool(peaks) is bool(texts), "what needs no texts is read when it is written"
    for each in found.values():
        each.whole().restored()
    layer = sum(weight.numel() for weight in decoder_layers(model.net)[0].parameters())
    assert 0 < max(peaks) < layer + model.net.model.embed_tokens.weight.numel() + 1024
    assert same(found, calibrate(model, schemes, texts))


@pytest.mark.slow
def test_the_reference_targets_numbers_are_those_of_the_model_in_memory(pair, tmp_path):
    """Bit for bit, and so are the logits by which their cost is measured."""
    checkpoint = find(str(pair / "target"))
    net = skeleton(checkpoint.config, "eager")
    assert checkpoint.tensors is not None
    model, whole = LayeredModel(net, of_names(net, checkpoint.tensors)), load(checkpoint, "eager")
    text = checkpoint.tokenizer("def median(values):\n    ordered = sorted(values)\n")["input_ids"]
    schemes = inside(whole, GPTQ)
    found, exact = (
        calibrate(each, schemes, [text], cache)
        for each, cache in ((model, CalibrationCache(tmp_path)), (of(whole), None))
    )
    assert same(found, exact)
    assert (model.logits([text])[0] == text_logits(whole, text)).all()
    with simulated(model, found) as changed, holding(whole, exact):
        assert (changed.logits([text])[0] == text_logits(whole, text)).all()


@pytest.mark.slow
def test_only_one_layers_states_and_statistics_are_held():
    model = random_model("llama", num_hidden_layers=6)
    states, counts, statistics = list[weakref.ref[Tensor]](), list[int](), list[int]()

    def watch(_module, _inputs, output):
        states.append(weakref.ref(output if isinstance(output, Tensor) else output[0]))
        counts.append(len({id(each) for ref in states if (each := ref()) is not None}))

    def count(_phase, _share):
        statistics.append(sum(type(each) is Tensor and each.shape == (96, 96) for each in gc.get_objects()))

    for layer in decoder_layers(model):
        layer.register_forward_hook(watch)
    calibrate(of(model), inside(model, GPTQ), TEXTS, progress=count)
    assert 0 < max(counts) <= 3 * len(TEXTS)  # what goes in, what came out, and what came out before quantizing
    assert max(statistics) <= 1  # second moments of what the last product of a layer reads
