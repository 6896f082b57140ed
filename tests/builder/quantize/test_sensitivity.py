"""What each layer costs, and `auto`: a planted layer that INT4 ruins is found, and kept wide within the bound."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, repeat
from typing import Any

import numpy as np
import pytest
import torch
from small_models import random_model, random_texts

from specbuild.builder.config.quantize_options import QuantizeOptions
from specbuild.builder.config.scheme import Scheme
from specbuild.builder.frontend.reference import greedy, text_logits
from specbuild.builder.quantize import sensitivity
from specbuild.builder.quantize.calibrate import Found, calibrate
from specbuild.builder.quantize.linears import Names, simulated
from specbuild.builder.quantize.quality import Before, acceptance
from specbuild.builder.quantize.sensitivity import Cost, costs, narrowest, stored, units, within
from specbuild.builder.quantize.stage import Request, quantize_model
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

    def moved(self, found: Found) -> float:
        with simulated(self.model, found):
            pairs = zip(self.before.logits, self.before.texts, strict=True)
            return float(np.concatenate([kl(a, text_logits(self.model, text)) for a, text in pairs]).mean())


@pytest.fixture(scope="module")
def case() -> Case:
    return Case()


def no_progress(phase: str, share: float) -> None:
    pass


def test_units_are_products_of_one_input(case: Case) -> None:
    assert [
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.self_attn.k_proj",
        "model.layers.1.self_attn.v_proj",
    ] in (case.split)
    assert [PLANTED] in case.split
    assert case.split[-1] == ["model.embed_tokens"]
    assert sorted(name for unit in case.split for name in unit) == sorted(case.names.weights)


def test_a_tied_head_and_embedding_are_one_unit() -> None:
    model = random_model("llama", num_hidden_layers=1, tie_word_embeddings=True)
    names = Names.of(model)
    assert units(model, names, names.weights)[-1] == ["lm_head", "model.embed_tokens"]
    assert units(model, names, ["model.embed_tokens"]) == [["model.embed_tokens"]]
    assert units(model, names, ["lm_head"]) == [["lm_head"]]


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


def test_bytes_of_a_tied_weight_count_once_unless_it_is_two() -> None:
    model = random_model("llama", num_hidden_layers=1, tie_word_embeddings=True)
    both = ["lm_head", "model.embed_tokens"]
    numbers = [calibrate(model, dict.fromkeys(both, scheme), []) for scheme in (INT4, INT8)]
    narrow, wide = (each["lm_head"] for each in numbers)
    sizes = {"narrow": 97 * (32 + 4), "wide": 97 * (64 + 16), "float": 97 * 64 * 4}
    assert stored({}, model, both) == sizes["float"]
    assert stored(dict.fromkeys(both, wide), model, both) == sizes["wide"]
    assert stored({both[0]: narrow, both[1]: wide}, model, both) == sizes["narrow"] + sizes["wide"]
    assert stored({both[0]: narrow}, model, both) == sizes["narrow"] + sizes["float"]


def test_the_planted_layer_costs_most(case: Case) -> None:
    told: list[float] = []
    found = costs(case.model, case.narrow, case.split, case.before, lambda _, share: told.append(share))
    assert [cost.names for cost in found] == case.split
    worst = max(found, key=lambda cost: cost.kl)
    assert worst.names == [PLANTED]
    assert worst.kl > 1.5 * sorted(cost.kl for cost in found)[-2]
    assert min(found, key=lambda cost: cost.cosine).names == [PLANTED]
    assert all(0 <= cost.cosine < 1 for cost in found[:-1])
    assert found[-1].cosine == 1.0  # a lookup has no product
    assert told == [each / len(case.split) for each in range(len(case.split))]


def test_a_cost_is_what_one_unit_alone_changes(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sensitivity, "TOKENS", None)
    unit = case.split[0]
    alone = {name: case.narrow[name] for name in unit}
    (cost,) = costs(case.model, case.narrow, [unit], case.before, no_progress)
    assert cost == Cost(unit, str(INT4), stored(case.narrow, case.model, unit), cost.kl, cost.cosine)
    assert cost.kl == pytest.approx(case.moved(alone))
    (exact,) = costs(case.model, {}, [unit], case.before, no_progress)
    assert (exact.kl, exact.cosine) == (0.0, 1.0)


@pytest.mark.parametrize("share", [0.02, 0.2, 0.6])
def test_auto_keeps_the_planted_layer_wide(case: Case, share: float) -> None:
    bound = share * case.moved(case.narrow)
    assert case.moved(case.wide) < bound
    found = within(case.model, [case.narrow, case.wide], case.split, case.before, bound)
    assert case.moved(found) <= bound
    assert found.get(PLANTED) is not case.narrow[PLANTED]
    kept = [name for name in found if found[name] is case.narrow[name]]
    widened = [name for name in case.names.weights if name not in kept]
    assert PLANTED in widened
    if share > 0.1:
        assert len(kept) > len(widened)


def test_a_wider_bound_takes_fewer_bytes(case: Case) -> None:
    most, sizes = case.moved(case.narrow), []
    for bound in (1e-9, 0.003 * most, 0.1 * most, 0.5 * most, 10 * most):
        found = within(case.model, [case.narrow, case.wide], case.split, case.before, bound)
        assert case.moved(found) <= bound
        sizes.append(stored(found, case.model, case.names.weights))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == stored({}, case.model, case.names.weights)  # nothing is quantized
    assert sizes[-1] == stored(case.narrow, case.model, case.names.weights)


def test_units_widen_as_one(case: Case) -> None:
    bound = 0.05 * case.moved(case.narrow)
    found = within(case.model, [case.narrow, case.wide], case.split, case.before, bound)
    for unit in case.split:
        assert len({str(found[name].scheme) if name in found else None for name in unit}) == 1


def test_what_was_asked_for_stays(case: Case) -> None:
    """Weights that are in no unit are as the rungs have them, here in INT4 in each."""
    asked = "model.layers.0.mlp.down_proj"
    wide = case.wide | {asked: case.narrow[asked]}
    free = [unit for unit in case.split if asked not in unit]
    alone = case.moved({asked: case.narrow[asked]})
    found = within(case.model, [case.narrow, wide], free, case.before, 1.5 * alone)
    assert found[asked] is case.narrow[asked]
    assert case.moved(found) <= 1.5 * alone


@pytest.fixture
def bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends a search that does not end."""
    calls, real = [0], sensitivity.distance

    def counted(*args: Any, **named: Any) -> Any:
        calls[0] += 1
        assert calls[0] < 300, "the search does not end"
        return real(*args, **named)

    monkeypatch.setattr(sensitivity, "distance", counted)


@pytest.mark.usefixtures("bounded")
def test_a_bound_that_nothing_reaches_is_refused(case: Case) -> None:
    free = [unit for unit in case.split if PLANTED not in unit]
    wide = case.wide | {PLANTED: case.narrow[PLANTED]}
    with pytest.raises(ExecutionError, match=r"auto cannot stay below 0\.001 nats a token: what --tensor-type asks"):
        within(case.model, [case.narrow, wide], free, case.before, 0.001)


@pytest.mark.usefixtures("bounded")
def test_a_bound_that_nothing_reaches_is_refused_where_units_cost_nothing(case: Case) -> None:
    """They are widened all the same, and the search ends."""
    found = {"model.layers.0.mlp.down_proj": case.narrow["model.layers.0.mlp.down_proj"]}
    unit = ["model.layers.2.mlp.down_proj"]
    weight = case.model.get_submodule(unit[0]).weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight.zero_()
    try:
        exact = case.numbers(INT8)
        quiet = Before.of(case.model, TEXTS, [], 64)
        rung = found | {unit[0]: exact[unit[0]]}
        with pytest.raises(ExecutionError, match="auto cannot stay below 1e-06"):
            within(case.model, [rung, rung], [unit], quiet, 1e-6)
        assert within(case.model, [{unit[0]: exact[unit[0]]}] * 2, [unit], quiet, 1e-6) == {unit[0]: exact[unit[0]]}
    finally:
        with torch.no_grad():
            weight.copy_(before)


@pytest.mark.usefixtures("bounded")
def test_nothing_to_choose_is_what_was_asked(case: Case) -> None:
    asked = {PLANTED: case.wide[PLANTED]}
    assert within(case.model, [asked, asked], [], case.before, 1.0) == asked
    assert within(case.model, [{}, {}], [], case.before, 1.0) == {}
    with pytest.raises(ExecutionError, match="auto cannot stay below"):
        within(case.model, [asked, asked], [], case.before, 1e-12)


def test_a_draft_is_as_narrow_as_its_acceptance_lets_it(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    references = greedy(case.model, TEXTS, 24, [])
    before, narrow = acceptance(case.model, case.narrow, references)
    wide = acceptance(case.model, case.wide, references)[1]
    assert narrow < wide < before
    monkeypatch.setattr(sensitivity, "LEAST_ACCEPTANCE", wide / before)
    assert narrowest(case.model, [case.narrow, case.wide], references) is case.wide
    assert narrowest(case.model, [case.wide, case.narrow], references) is case.wide
    assert narrowest(case.model, [case.narrow], references) == {}
    monkeypatch.setattr(sensitivity, "LEAST_ACCEPTANCE", 1.001 * wide / before)
    assert narrowest(case.model, [case.narrow, case.wide], references) == {}
    monkeypatch.setattr(sensitivity, "LEAST_ACCEPTANCE", narrow / before)
    assert narrowest(case.model, [case.narrow, case.wide], references) is case.narrow


# The stage, which is all of it.


def quantized(case: Case, precision: str, model: str = "target", **options: Any) -> Any:
    from specbuild.builder.config.quantize_options import AUTO_KL
    from specbuild.builder.quantize.assignment import assign

    asked = QuantizeOptions(**options)
    texts = Texts(random_texts(4, 24, seed=5), TEXTS, "here", "hash")
    schemes = assign(asked, model, precision, "onnxruntime", case.names)
    request = Request(
        model, precision, "onnxruntime", asked, texts, asked.max_kl or (AUTO_KL if precision == "auto" else 10.0)
    )
    references = greedy(case.model, TEXTS, 24, [])
    return quantize_model(case.model, request, case.names, schemes, case.before, references, "id", no_progress)


def test_auto_of_a_target(case: Case) -> None:
    found = quantized(case, "auto", max_kl=0.02, tensor_type=("layers.0.mlp.down_proj=int8:64",))
    assert str(found.found["model.layers.0.mlp.down_proj"].scheme) == "int8:64,sym,rtn,dynamic"
    assert case.moved(found.found) <= 0.02
    kinds = {each.scheme.kind for each in found.found.values()}
    assert "int4" in kinds
    told = found.to_dict()
    assert told["weight_bytes"] < told["weight_bytes_before"] == stored({}, case.model, case.names.weights)
    assert {tuple(cost["names"]) for cost in told["layers"]} <= set(map(tuple, case.split))
    assert "acceptance_length" not in told


def test_auto_of_a_draft_has_what_was_asked_for_all_the_same(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sensitivity, "LEAST_ACCEPTANCE", 2.0)  # more than any has
    found = quantized(case, "auto", "draft", tensor_type=("layers.0.mlp.down_proj=int8",))
    assert list(found.found) == ["model.layers.0.mlp.down_proj"]
    assert found.left == []
    assert quantized(case, "auto", "draft").found == {}


def test_a_draft_is_told_by_its_acceptance(case: Case) -> None:
    found = quantized(case, "int8", "draft")
    told = found.to_dict()
    assert len(told["acceptance_length"]) == 2
    assert told["kl_nats_per_token"] == pytest.approx(case.moved(found.found))
    assert told["not_quantized"] == []


def test_weights_without_a_block_are_named() -> None:
    case = Case(intermediate_size=64, hidden_size=64, head_dim=18)
    found = quantized(case, "int8")
    assert found.left == [f"model.layers.{layer}.self_attn.o_proj" for layer in range(3)]


@pytest.mark.parametrize("precision", ["int8", "int4", "int8:gptq"])
def test_a_tied_weights_numbers_are_stored_once(precision: str) -> None:
    case = Case(tie_word_embeddings=True)
    found = quantized(case, precision).found
    assert found["lm_head"] is found["model.embed_tokens"]


def test_weights_that_are_not_tied_whatever_the_configuration_says() -> None:
    case = Case(tie_word_embeddings=True)
    case.model.lm_head.weight = torch.nn.Parameter(1 + case.model.lm_head.weight.detach())
    assert not Names.of(case.model).tied


def test_what_is_kept_wide_is_in_the_report(case: Case) -> None:
    told = quantized(case, "int8", tensor_type=("layers.0.mlp.down_proj=fp32",)).to_dict()
    (kept,) = (layer for layer in told["layers"] if layer["precision"] == "fp32")
    assert kept["names"] == ["model.layers.0.mlp.down_proj"]
    assert (kept["kl"], kept["cosine"]) == (0.0, 1.0)


def test_units_are_widened_where_a_byte_helps_most(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The larger unit costs a little more, and far more a byte."""
    small, large = ["model.layers.0.self_attn.o_proj"], ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"]
    kls = {(4, *small): 0.4, (4, *large): 0.5, (8, *small): 0.01, (8, *large): 0.01}

    def known(model: Any, found: Found, split: Any, *_: Any) -> list[Cost]:
        units = [unit for unit in split if unit[0] in found]
        return [Cost(unit, "", 0, kls[(found[unit[0]].scheme.bits, *unit)], 1.0) for unit in units]

    monkeypatch.setattr(sensitivity, "costs", known)
    moved = dict[str, Iterator[float]]()
    monkeypatch.setattr(sensitivity, "distance", lambda *_, **__: next(moved["by"]))
    rungs = [{name: found[name] for name in small + large} for found in (case.narrow, case.wide)]

    def bits(bound: float) -> list[int]:
        moved["by"] = chain([10.0], repeat(0.0))  # all of the narrowest together move too far, what is chosen does not
        found = within(case.model, rungs, [small, large], case.before, bound)
        return [found[unit[0]].scheme.bits if unit[0] in found else 32 for unit in (small, large)]

    assert bits(0.9) == [4, 4]
    assert bits(0.6) == [8, 4]
    assert bits(0.05) == [8, 8]
    assert bits(0.015) == [32, 8]
