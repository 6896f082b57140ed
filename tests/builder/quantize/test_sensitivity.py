"""What each layer costs, and `auto`: a planted layer that INT4 ruins is found, and kept wide within the bound."""

import numpy as np
import pytest
import torch
from small_models import holding, random_model, random_texts

from specbuild.builder.config.quantize_options import QuantizeOptions
from specbuild.builder.config.scheme import Scheme
from specbuild.builder.frontend.layer_by_layer import LayeredModel
from specbuild.builder.frontend.reference import text_logits
from specbuild.builder.quantize.assignment import assign
from specbuild.builder.quantize.calibrate import calibrate
from specbuild.builder.quantize.linears import Names, simulated
from specbuild.builder.quantize.quality import Before, acceptance
from specbuild.builder.quantize.sensitivity import costs, narrowest, stored, units, within
from specbuild.builder.quantize.stage import Request, quantize_model
from specbuild.builder.quantize.texts import Texts
from specbuild.measure.divergence import kl
from specbuild.runtime.errors import ExecutionError

TEXTS = random_texts(3, 20)
INT4 = Scheme("int4", "fp32", 64)
INT8 = Scheme("int8", "fp32", 16)
PLANTED = "model.layers.1.mlp.down_proj"


def planted(**fields):
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

    def __init__(self, **fields):
        self.net = planted(**fields)
        self.model, self.names = LayeredModel.of(self.net), Names.of(self.net)
        self.split = units(self.model, self.names, self.names.weights)
        self.narrow, self.wide = (self.numbers(scheme) for scheme in (INT4, INT8))
        self.before = Before.of(self.model, TEXTS)

    def numbers(self, scheme):
        return calibrate(self.model, dict.fromkeys(self.names.weights, scheme), [])

    def moved(self, found):
        with holding(self.net, found):
            pairs = zip(self.before.logits, self.before.texts, strict=True)
            return float(np.concatenate([kl(a, text_logits(self.net, text)) for a, text in pairs]).mean())

    def accepted(self, found):
        with simulated(self.model, found) as changed:
            return acceptance(self.before, changed.logits(self.before.texts))


@pytest.fixture(scope="module")
def case():
    return Case()


def no_progress(phase, share):
    pass


def test_the_planted_layer_costs_most(case):
    """A cost is what one unit alone changes."""
    found = costs(case.model, case.narrow, case.split, case.before, no_progress)
    assert [cost.names for cost in found] == case.split
    worst = max(found, key=lambda cost: cost.kl)
    assert worst == min(found, key=lambda cost: cost.cosine)
    assert (worst.names, worst.precision) == ([PLANTED], str(INT4))
    assert worst.bytes == stored(case.narrow, case.model, [PLANTED])
    assert worst.kl == pytest.approx(case.moved({PLANTED: case.narrow[PLANTED]}), rel=0.5)  # on one text
    assert found[-1].cosine == 1.0  # a lookup has no product
    (exact,) = costs(case.model, {}, [[PLANTED]], case.before, no_progress)
    assert (exact.kl, exact.cosine) == (0.0, 1.0)


def test_the_smaller_the_bound_the_more_is_kept_wide(case):
    """The planted layer first, and products of one input as one."""
    most, sizes = case.moved(case.narrow), []
    for bound in (1e-9, 0.02 * most, 0.6 * most, 10 * most):
        found = within(case.model, [case.narrow, case.wide], case.split, case.before, bound)
        assert case.moved(found) <= bound
        sizes.append(stored(found, case.model, case.names.weights))
        narrow = {name for name in found if found[name] is case.narrow[name]}
        assert (PLANTED in narrow) is (bound > most)
        assert all(set(unit) <= narrow or not narrow & set(unit) for unit in case.split)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == stored({}, case.model, case.names.weights)  # nothing is quantized
    assert sizes[-1] == stored(case.narrow, case.model, case.names.weights)


def test_a_bound_that_nothing_reaches_is_refused(case):
    """Weights in no unit are as the rungs have them, here in INT4 in each."""
    free, alone = [unit for unit in case.split if PLANTED not in unit], {PLANTED: case.narrow[PLANTED]}
    rungs, bound = [case.narrow, case.wide | alone], 1.5 * case.moved(alone)
    found = within(case.model, rungs, free, case.before, bound)
    assert found[PLANTED] is case.narrow[PLANTED]
    assert case.moved(found) <= bound
    with pytest.raises(ExecutionError, match=r"auto cannot stay below 0\.001 nats a token: what --tensor"):
        within(case.model, rungs, free, case.before, 0.001)


def test_a_draft_is_as_narrow_as_its_acceptance_lets_it(case):
    before, narrow = acceptance(case.before, case.before.logits), case.accepted(case.narrow)
    assert narrow < 0.8 * before
    units = [{name: case.wide[name] for name in unit} for unit in case.split]
    harmless = next(each for each in units if case.accepted(each) >= before)
    assert narrowest(case.model, [case.narrow, harmless, case.wide], case.before, case.before) is harmless
    assert narrowest(case.model, [case.narrow], case.before, case.before) == {}


@pytest.mark.parametrize("model", ["target", "draft"])
def test_auto_has_what_was_asked_for_and_stays_within_its_bound(case, model):
    """A target's divergence, a draft's acceptance."""
    found = quantized(case, "auto", model, max_kl=0.02, tensor_type=("layers.0.mlp.down_proj=int8:64",))
    assert str(found.numbers["model.layers.0.mlp.down_proj"].scheme) == "int8:64,sym,rtn,wide"
    report = found.to_dict()
    assert report["weight_bytes"] <= report["weight_bytes_before"] == stored({}, case.model, case.names.weights)
    if model == "draft":
        before, after = report["acceptance_length"]
        assert after >= 0.98 * before or len(found.numbers) == 1, "all of it costs too much"
    else:
        assert "acceptance_length" not in report
        assert case.moved(found.numbers) <= 0.02
        assert "int4" in {each.scheme.kind for each in found.numbers.values()}


def test_the_report_has_what_each_layer_costs(case):
    found = quantized(case, "int8", "draft", tensor_type=("layers.0.mlp.down_proj=fp32",))
    report = found.to_dict()
    assert report["kl_nats_per_token"] == pytest.approx(case.moved(found.numbers))
    assert report["not_quantized"] == []
    (kept,) = (layer for layer in report["layers"] if layer["precision"] == "fp32")
    assert (kept["names"], kept["kl"], kept["cosine"]) == (["model.layers.0.mlp.down_proj"], 0.0, 1.0)


def quantized(case, precision, model="target", **options):
    asked, max_kl = QuantizeOptions(**options), options.get("max_kl", 10.0)
    texts = Texts(random_texts(4, 24, seed=5), TEXTS, "here", "hash")
    schemes = assign(asked, model, precision, "onnxruntime", case.names)
    request = Request(model, precision, "onnxruntime", asked, texts, max_kl)
    given = schemes, case.before, case.before
    return quantize_model(case.model, request, case.names, *given, "id", no_progress)


def test_weights_without_a_block_are_named():
    found = quantized(Case(head_dim=18), "int8")
    assert found.remainder == [f"model.layers.{layer}.self_attn.o_proj" for layer in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["int8", "int8:gptq"])
def test_a_tied_weights_numbers_are_stored_once(precision):
    case = Case(tie_word_embeddings=True)
    found = quantized(case, precision).numbers
    assert found["lm_head"] is found["model.embed_tokens"]
    apart = quantized(case, precision, token_embedding_type="fp32").numbers
    assert {"lm_head", "model.embed_tokens"} & set(apart) == {"lm_head"}


def test_a_tied_head_and_embedding_are_one_unit_whose_bytes_count_once_unless_they_are_two():
    model = LayeredModel.of(random_model("llama", num_hidden_layers=1, tie_word_embeddings=True))
    both = ["lm_head", "model.embed_tokens"]
    assert units(model, Names.of(model.net), both) == [both]
    assert units(model, Names.of(model.net), both[:1]) == [both[:1]]
    narrow, wide = (calibrate(model, dict.fromkeys(both, scheme), [])["lm_head"] for scheme in (INT4, INT8))
    assert stored({}, model, both) == 97 * 64 * 4
    assert stored(dict.fromkeys(both, wide), model, both) == 97 * (64 + 16)
    assert stored({both[0]: narrow, both[1]: wide}, model, both) == 97 * (32 + 4 + 64 + 16)
    assert stored({both[0]: narrow}, model, both) == 97 * (32 + 4 + 64 * 4)


def test_the_search_ends_where_units_cost_nothing():
    unit, other, case = ["model.layers.2.mlp.down_proj"], "model.layers.0.mlp.down_proj", Case()
    with torch.no_grad():
        case.net.get_submodule(unit[0]).weight.zero_()
    before, exact = Before.of(case.model, TEXTS), {unit[0]: case.numbers(INT8)[unit[0]]}
    rung = exact | {other: case.narrow[other]}
    with pytest.raises(ExecutionError, match="auto cannot stay below 1e-06"):
        within(case.model, [rung, rung], [unit], before, 1e-6)
    assert within(case.model, [exact, exact], [unit], before, 1e-6) == exact
