"""What each layer costs, and `auto`: a planted layer that INT4 ruins is found, and kept wide within the bound."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from small_models import random_model, random_texts

from specbuild.builder.config.quantize_options import QuantizeOptions
from specbuild.builder.config.scheme import Scheme
from specbuild.builder.frontend.reference import greedy, text_logits
from specbuild.builder.quantize.assignment import assign
from specbuild.builder.quantize.calibrate import Found, calibrate
from specbuild.builder.quantize.linears import Names, simulated
from specbuild.builder.quantize.quality import Before, acceptance
from specbuild.builder.quantize.sensitivity import Cost, costs, narrowest, stored, units, within
from specbuild.builder.quantize.stage import Quantization, Request, quantize_model
from specbuild.builder.quantize.texts import Texts
from specbuild.measure.divergence import kl
from specbuild.runtime.errors import ExecutionError

TEXTS = random_texts(3, 20)
INT4 = Scheme("int4", "fp32", 64)
INT8 = Scheme("int8", "fp32", 16)
PLANTED = "model.layers.1.mlp.down_proj"


def planted(**fields: Any) -> Any:
    """A model with a product whose rows of large and small numbers INT4 cannot have both."""
    model = random_model("llama", **{"intermediate_size": 64} | fields)
    weight = model.get_submodule(PLANTED).weight
    with torch.no_grad():
        weight *= 1.5
        weight[:, 3] *= 100
        model.get_submodule(PLANTED.replace("down", "up")).weight[3] /= 100  # what it is multiplied with
    return model


class Case:
    """A planted model, its numbers and units, and what it computed before."""

    def __init__(self, **fields: Any) -> None:
        self.model = planted(**fields)
        self.names = Names.of(self.model)
        self.split = units(self.model, self.names, self.names.weights)
        self.narrow, self.wide = (self.numbers(scheme) for scheme in (INT4, INT8))
        self.before = Before.of(self.model, TEXTS, [], 64)

    def numbers(self, scheme: Scheme) -> Found:
        return calibrate(self.model, dict.fromkeys(self.names.weights, scheme), [])

    def moved(self, found: Found, before: Before | None = None) -> float:
        before = before or self.before
        with simulated(self.model, found):
            pairs = zip(before.logits, before.texts, strict=True)
            return float(np.concatenate([kl(a, text_logits(self.model, text)) for a, text in pairs]).mean())


@pytest.fixture(scope="module")
def case() -> Case:
    return Case()


def no_progress(phase: str, share: float) -> None:
    pass


def test_units_are_products_of_one_input(case: Case) -> None:
    assert [f"model.layers.1.self_attn.{each}_proj" for each in "qkv"] in case.split
    assert [PLANTED] in case.split
    assert case.split[-1] == ["model.embed_tokens"]
    assert sorted(name for unit in case.split for name in unit) == sorted(case.names.weights)


def test_bytes_are_those_that_are_stored(case: Case) -> None:
    unit = ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"]
    assert stored({}, case.model, unit) == 2 * 64 * 64 * 4
    assert stored(case.wide, case.model, unit) == 2 * 64 * (64 + 4 * 4)
    assert stored(case.narrow, case.model, unit) == 2 * 64 * (32 + 4)
    zeros = case.numbers(Scheme("int4", "fp32", 64, symmetric=False))
    assert stored(zeros, case.model, unit) == 2 * 64 * (32 + 4) + 64
    assert stored({unit[0]: case.narrow[unit[0]]}, case.model, unit) == 64 * (32 + 4) + 64 * 64 * 4
    moved = {name: replace(each, offsets=torch.ones(64, 1)) for name, each in zeros.items()}
    assert stored(moved, case.model, unit) == 3 * stored(zeros, case.model, unit)  # two blocks hold the offsets' codes


def test_the_planted_layer_costs_most(case: Case) -> None:
    found = costs(case.model, case.narrow, case.split, case.before, no_progress)
    assert [cost.names for cost in found] == case.split
    worst = max(found, key=lambda cost: cost.kl)
    assert worst == min(found, key=lambda cost: cost.cosine)
    assert worst.names == [PLANTED]
    assert worst.kl > 1.5 * sorted(cost.kl for cost in found)[-2]
    assert found[-1].cosine == 1.0  # a lookup has no product


def test_a_cost_is_what_one_unit_alone_changes(case: Case) -> None:
    unit = case.split[0]
    short = Before.of(case.model, [TEXTS[0]], [], 64)
    (cost,) = costs(case.model, case.narrow, [unit], short, no_progress)
    assert cost == Cost(unit, str(INT4), stored(case.narrow, case.model, unit), cost.kl, cost.cosine)
    assert cost.kl == pytest.approx(case.moved({name: case.narrow[name] for name in unit}, short))
    (exact,) = costs(case.model, {}, [unit], case.before, no_progress)
    assert (exact.kl, exact.cosine) == (0.0, 1.0)


@pytest.mark.parametrize("share", [0.02, 0.6])
def test_auto_keeps_the_planted_layer_wide(case: Case, share: float) -> None:
    bound = share * case.moved(case.narrow)
    assert case.moved(case.wide) < bound
    found = within(case.model, [case.narrow, case.wide], case.split, case.before, bound)
    assert case.moved(found) <= bound
    kept = {name for name in found if found[name] is case.narrow[name]}
    assert PLANTED not in kept
    assert len(kept) > len(case.names.weights) / 2 or share < 0.1
    assert all(set(unit) <= kept or not kept & set(unit) for unit in case.split), "products of one input widen as one"


def test_a_wider_bound_takes_fewer_bytes(case: Case) -> None:
    most, sizes = case.moved(case.narrow), []
    for bound in (1e-9, 0.003 * most, 0.1 * most, 0.5 * most, 10 * most):
        found = within(case.model, [case.narrow, case.wide], case.split, case.before, bound)
        assert case.moved(found) <= bound
        sizes.append(stored(found, case.model, case.names.weights))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == stored({}, case.model, case.names.weights)  # nothing is quantized
    assert sizes[-1] == stored(case.narrow, case.model, case.names.weights)


def test_a_bound_that_nothing_reaches_is_refused(case: Case) -> None:
    """Weights in no unit are as the rungs have them, here in INT4 in each."""
    free = [unit for unit in case.split if PLANTED not in unit]
    rungs, alone = [case.narrow, case.wide | {PLANTED: case.narrow[PLANTED]}], {PLANTED: case.narrow[PLANTED]}
    bound = 1.5 * case.moved(alone)
    found = within(case.model, rungs, free, case.before, bound)
    assert found[PLANTED] is case.narrow[PLANTED]
    assert case.moved(found) <= bound
    for given, split in ((rungs, free), ([alone, alone], [])):
        with pytest.raises(ExecutionError, match=r"auto cannot stay below 0\.001 nats a token: what --tensor"):
            within(case.model, given, split, case.before, 0.001)


def test_a_draft_is_as_narrow_as_its_acceptance_lets_it(case: Case) -> None:
    references = greedy(case.model, TEXTS, 24, [])
    before, narrow = acceptance(case.model, case.narrow, references)
    assert narrow < 0.8 * before
    units = [{name: case.wide[name] for name in unit} for unit in case.split]
    harmless = next(each for each in units if acceptance(case.model, each, references)[1] >= before)
    assert narrowest(case.model, [case.narrow, harmless, case.wide], references) is harmless
    assert narrowest(case.model, [case.narrow], references) == {}


def quantized(case: Case, precision: str, model: str = "target", **options: Any) -> Quantization:
    asked, max_kl = QuantizeOptions(**options), options.get("max_kl", 10.0)
    texts = Texts(random_texts(4, 24, seed=5), TEXTS, "here", "hash")
    schemes = assign(asked, model, precision, "onnxruntime", case.names)
    request = Request(model, precision, "onnxruntime", asked, texts, max_kl)
    references = greedy(case.model, TEXTS, 24, [])
    return quantize_model(case.model, request, case.names, schemes, case.before, references, "id", no_progress)


def test_auto_of_a_target(case: Case) -> None:
    found = quantized(case, "auto", max_kl=0.02, tensor_type=("layers.0.mlp.down_proj=int8:64",))
    assert str(found.found["model.layers.0.mlp.down_proj"].scheme) == "int8:64,sym,rtn,dynamic"
    assert case.moved(found.found) <= 0.02
    assert "int4" in {each.scheme.kind for each in found.found.values()}
    told = found.to_dict()
    assert told["weight_bytes"] < told["weight_bytes_before"] == stored({}, case.model, case.names.weights)
    assert {tuple(cost["names"]) for cost in told["layers"]} <= set(map(tuple, case.split))
    assert "acceptance_length" not in told


def test_weights_without_a_block_are_named() -> None:
    case = Case(intermediate_size=64, hidden_size=64, head_dim=18)
    found = quantized(case, "int8")
    assert found.left == [f"model.layers.{layer}.self_attn.o_proj" for layer in range(3)]


@pytest.mark.parametrize("precision", ["int8", "int8:gptq"])
def test_a_tied_weights_numbers_are_stored_once(precision: str) -> None:
    case = Case(tie_word_embeddings=True)
    found = quantized(case, precision).found
    assert found["lm_head"] is found["model.embed_tokens"]
    apart = quantized(case, precision, token_embedding_type="fp32").found
    assert ("lm_head" in apart, "model.embed_tokens" in apart) == (True, False)


def test_a_tied_head_and_embedding_are_one_unit_whose_bytes_count_once_unless_they_are_two() -> None:
    model = random_model("llama", num_hidden_layers=1, tie_word_embeddings=True)
    names, both = Names.of(model), ["lm_head", "model.embed_tokens"]
    assert units(model, names, names.weights)[-1] == both
    assert units(model, names, both[:1]) == [both[:1]]
    numbers = [calibrate(model, dict.fromkeys(both, scheme), []) for scheme in (INT4, INT8)]
    narrow, wide = (each["lm_head"] for each in numbers)
    sizes = {"narrow": 97 * (32 + 4), "wide": 97 * (64 + 16), "float": 97 * 64 * 4}
    assert stored({}, model, both) == sizes["float"]
    assert stored(dict.fromkeys(both, wide), model, both) == sizes["wide"]
    assert stored({both[0]: narrow, both[1]: wide}, model, both) == sizes["narrow"] + sizes["wide"]
    assert stored({both[0]: narrow}, model, both) == sizes["narrow"] + sizes["float"]


def test_the_search_ends_where_units_cost_nothing(case: Case) -> None:
    unit, other = ["model.layers.2.mlp.down_proj"], "model.layers.0.mlp.down_proj"
    quiet = Case()
    with torch.no_grad():
        quiet.model.get_submodule(unit[0]).weight.zero_()
    before, exact = Before.of(quiet.model, TEXTS, [], 64), {unit[0]: quiet.numbers(INT8)[unit[0]]}
    rung = exact | {other: case.narrow[other]}
    with pytest.raises(ExecutionError, match="auto cannot stay below 1e-06"):
        within(quiet.model, [rung, rung], [unit], before, 1e-6)
    assert within(quiet.model, [exact, exact], [unit], before, 1e-6) == exact


def test_a_draft_reports_its_acceptance(case: Case) -> None:
    found = quantized(case, "int8", "draft", tensor_type=("layers.0.mlp.down_proj=fp32",))
    told = found.to_dict()
    assert len(told["acceptance_length"]) == 2
    assert told["kl_nats_per_token"] == pytest.approx(case.moved(found.found))
    assert told["not_quantized"] == []
    (kept,) = (layer for layer in told["layers"] if layer["precision"] == "fp32")
    assert (kept["names"], kept["kl"], kept["cosine"]) == (["model.layers.0.mlp.down_proj"], 0.0, 1.0)


def test_auto_of_a_draft_keeps_its_acceptance(case: Case) -> None:
    found = quantized(case, "auto", "draft", tensor_type=("layers.0.mlp.down_proj=int8:64",))
    assert str(found.found["model.layers.0.mlp.down_proj"].scheme) == "int8:64,sym,rtn,dynamic"
    before, after = found.to_dict()["acceptance_length"]
    assert after >= 0.95 * before
