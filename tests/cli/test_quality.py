"""What quantization cost is told in a line for each model, and in tables with every layer."""

import pytest
from data_files import table

from specbuild.cli.quality import in_words, show
from specbuild.runtime.errors import OptionError

REPORT = table("quality.json")
TARGET, DRAFT = REPORT["target"], REPORT["draft"]


def shown(found, capsys):
    """What is printed of a single model, by the first words of each line of its table."""
    texts = {"source": "pycode", "tokens": {"calibration": 4096, "held_out": 512}}
    show({"texts": texts, "models": {"target": found}})
    lines = (line.strip().partition("  ") for line in capsys.readouterr().out.splitlines())
    return {name: rest.strip() for name, _, rest in lines}


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def test_tables_have_the_numbers(capsys):
    found = shown(TARGET, capsys)
    for name, number in {
        "weights": "0.250×",
        "KL to float32": "1.23e-03 ± 2e-04",
        "perplexity": "3.500 → –",
        "same first choice": "98.76%",
        "greedy texts": "2 of 4 texts of 64 tokens part, half of those before token 20",
        "not quantized": "layers.0.up_proj, lm_head",
        "layers.0.q_proj, k_proj": "0.99876",
    }.items():
        assert number in found[name]
    assert not {"acceptance length", "own grid"} & {*found}
    draft = shown(DRAFT, capsys)
    assert draft["acceptance length"].startswith("2.125 → 2.000")
    assert not {"KL to float32", "perplexity", "greedy texts", "not quantized"} & {*draft}
    assert "0 of 2 texts" in shown(TARGET | {"first_divergence": [None, None]}, capsys)["greedy texts"]
    assert "greedy texts" not in shown({k: v for k, v in TARGET.items() if k != "first_divergence"}, capsys)


def test_a_line_for_each_model_of_what_is_known(capsys):
    assert in_words(None) == in_words({"models": {}}) == []
    target, draft = in_words({"models": {"target": TARGET | {"own_grids": 210}, "draft": DRAFT}})
    assert "0.25× the weights, 1.2e-03 nats a token" in target
    assert target.endswith(", 210 weights on the grid that they had")
    assert draft == "draft: 0.33× the weights, acceptance length 2.12 → 2.00"
    assert shown(TARGET | {"own_grids": 210}, capsys)["own grid"].startswith("210 weights")


def test_compared_precisions_have_a_row_each(capsys):
    row = {"kl": {"texts": 0.002, "code": 0.03}, "top1": {"texts": 0.99, "code": 0.9}, "steps": {"1": 2.5, "8": 4.25}}
    rows = [row | {"precision": "int8", "bytes": 2.5e6, "perplexity": 3.456}]
    rows += [row | {"precision": "fp32", "bytes": 1e7, "perplexity": None}]
    found = shown(TARGET | {"compared": {"by": "best:size", "chosen": "int8", "precisions": rows}}, capsys)
    assert "best:size chose int8 of" in found
    numbers = "2.0e-03 3.0e-02 99.0% 90.0%".split()
    assert found["int8"].split() == ["2.5", *numbers, "3.46", "2.50", "4.25"]
    assert found["fp32"].split() == ["10.0", *numbers, "–", "2.50", "4.25"]


def test_without_quantization_there_is_nothing_to_show():
    with pytest.raises(OptionError, match="there is no quality to report"):
        show(None)
