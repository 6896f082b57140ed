"""Turned checkpoints: the same function, other weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


@pytest.fixture(scope="module")
def script(import_script: Callable[[str], Any]) -> Any:
    return import_script("rotate_checkpoint")


def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return torch.as_tensor(model(torch.arange(3, 27)[None]).logits)


@pytest.mark.parametrize("tied", [True, False])
def test_the_function_stays_and_the_weights_do_not(
    script: Any, make_checkpoint: Callable[..., Path], tmp_path: Path, tied: bool
) -> None:
    source = make_checkpoint(tmp_path / "tiny", tie_word_embeddings=tied, initializer_range=0.3)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data.uniform_(0.5, 2)
    model.save_pretrained(source)
    assert script.main([str(source), str(tmp_path / "out")]) == 0
    expected = logits(source)
    assert expected.std() > 0.5
    torch.testing.assert_close(logits(tmp_path / "out"), expected, atol=1e-4, rtol=0)
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    assert {"lm_head.weight"} | before.keys() == after.keys()
    assert not [name for name in before if (before[name] == after[name]).float().mean() > 0.01]
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_rotations_are_the_seeds_own(script: Any) -> None:
    turns = [script.rotation(16, seed) for seed in (0, 0, 1)]
    torch.testing.assert_close(turns[0] @ turns[0].T, torch.eye(16, dtype=torch.float64))
    assert torch.equal(turns[0], turns[1])
    assert not torch.allclose(turns[0], turns[2])


def test_what_is_refused(
    script: Any, make_checkpoint: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_checkpoint(tmp_path / "tiny", attention_bias=True)
    assert script.main([str(source), str(tmp_path / "out")]) == 2
    assert "is no Llama without biases" in capsys.readouterr().err
    assert script.main([str(tmp_path / "none"), str(tmp_path / "out")]) == 2
    assert script.main([str(source), str(source)]) == 2
    assert not (tmp_path / "out").exists()
