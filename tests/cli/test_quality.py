"""What quantization cost is told in a line for each model, and in tables with every layer."""

from __future__ import annotations

from typing import Any

import pytest

from specbuild.cli.quality import in_words, show

PRODUCTS = {"names": ["layers.0.q_proj", "layers.0.k_proj"], "precision": "int4", "bytes": 12_345}
HEAD = {"names": ["lm_head"], "precision": "int8", "bytes": 999}
TARGET: dict[str, Any] = {
    "weight_bytes": 2_500_000,
    "weight_bytes_before": 10_000_000,
    "tokens": 512,
    "kl_nats_per_token": 1.234e-3,
    "kl_standard_error": 2e-4,
    "kl_largest": 0.05,
    "logit_cosine": 0.99991,
    "perplexity": [3.5, None],
    "top1_agreement": 0.9876,
    "first_divergence": [None, 10, 30, None],
    "greedy_tokens": [60, 64],
    "steps": {"float32": {"1": 2.0, "8": 3.0}, "quantized": {"8": 1.5}},
    "not_quantized": ["layers.0.up_proj", "lm_head"],
    "layers": [PRODUCTS | {"cosine": 0.99876, "kl": 1e-3}, HEAD | {"cosine": 1.0, "kl": 0.0}],
}
DRAFT = {"weight_bytes": 1, "weight_bytes_before": 3, "not_quantized": [], "layers": []}
DRAFT |= {"acceptance_length": [2.125, 2.0]}
TEXTS = {"source": "pycode", "tokens": {"calibration": 4096, "held_out": 512}}


def shown(found: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """What is printed of a single model, by the first words of each line of its table."""
    show({"texts": TEXTS, "models": {"target": found}})
    lines = (line.strip().partition("  ") for line in capsys.readouterr().out.splitlines())
    return {name: rest.strip() for name, _, rest in lines}


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def test_a_line_for_each_model_of_what_is_known() -> None:
    assert in_words(None) == in_words({"models": {}}) == []
    target, draft = in_words({"models": {"target": TARGET, "draft": DRAFT}})
    words = "target: 0.25× the weights, 1.2e-03 nats a token from float32 on 512 held-out tokens, top-1 98.8%"
    assert target == words
    assert draft == "draft: 0.33× the weights, acceptance length 2.12 → 2.00"


def test_tables_have_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    found = shown(TARGET, capsys)
    assert "texts: pycode, calibrated on 4096 tokens, 512 held out" in found
    assert found["weights"] == "2.50 MB, 0.250× float32's"
    assert found["KL to float32"] == "1.23e-03 ± 2e-04 nats a token, 5.0e-02 at most"
    assert found["perplexity"] == "3.500 → –"
    assert found["same first choice"] == "98.76% of tokens"
    assert found["greedy texts"] == "2 of 4 texts of 64 tokens part, half of those before token 20"
    assert found["step of 8"] == "1.500 ms, 2.00× as fast as float32's 3.000 ms"
    assert found["not quantized"] == "layers.0.up_proj, lm_head: no block divides their rows"
    assert found["layers.0.q_proj, k_proj"].split() == ["int4", "12", "0.99876", "1.0e-03"]
    assert found["lm_head"].split() == ["int8", "1", "1.00000", "0.0e+00"]
    assert not {"acceptance length", "step of 1", "own grid"} & {*found}
    draft = shown(DRAFT, capsys)
    assert draft["acceptance length"] == "2.125 → 2.000, chains of 4 along the target's texts"
    assert not {"KL to float32", "perplexity", "greedy texts", "not quantized"} & {*draft}
    same = shown(TARGET | {"first_divergence": [None, None]}, capsys)
    assert same["greedy texts"] == "0 of 2 texts of 64 tokens part"


def test_weights_that_keep_their_grid_are_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    kept = TARGET | {"own_grids": 210}
    assert in_words({"models": {"target": kept}})[0].endswith(", top-1 98.8%, 210 weights on the grid that they had")
    assert shown(kept, capsys)["own grid"] == "210 weights lie on one already, as a GGUF's do, and keep it"
    assert "own grid" not in shown(TARGET | {"own_grids": 0}, capsys)
