"""Headers tell a checkpoint's sizes, and a configuration that asks for others is refused by the field's name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from specbuild.builder.frontend.weights import Header, check_sizes, check_stamps, read_header, sha256_files, stamps_of
from specbuild.runtime.errors import CheckpointError

SHAPES = {"transformer.h.0.attn.weight": (8, 24), "transformer.h.1.attn.weight": (8, 24), "wte.weight": (97, 8)}


def test_a_header_tells_sizes(tmp_path: Path) -> None:
    save_file({name: torch.zeros(shape) for name, shape in SHAPES.items()}, tmp_path / "a")
    found = read_header([tmp_path / "a"])
    assert dict(found.shapes) == SHAPES
    assert (found.layers, found.largest, found.elements) == (2, 97, 2 * 8 * 24 + 97 * 8)
    assert found.layer(2) == "transformer.h.2."
    assert (Header({}).layers, Header({}).largest, Header({}).elements) == (0, 0, 0)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, None),
        ({"n_layer": 2, "n_embd": 8, "vocab_size": 97, "n_positions": 1 << 20}, None),
        ({"n_layer": 3}, "n_layer 3, its weights have 2 and none of transformer.h.2."),
        ({"num_hidden_layers": 3}, "num_hidden_layers 3"),
        ({"n_layer": 2, "num_hidden_layers": 3}, "num_hidden_layers 3"),
        ({"n_embd": 98}, "n_embd 98, no dimension of its weights is beyond 97"),
        ({"n_positions": 1 << 32}, "n_positions 4294967296"),
        ({"deep": [{"n_things": 98}]}, "n_things 98"),
        ({"sliding_window": 10**9, "num_positions": 10**9, "eos_token_id": 10**9}, None),
    ],
)
def test_sizes_go_by_the_weights(fields: dict[str, Any], told: str | None) -> None:
    raw = {"model_type": "gpt2"} | fields
    if told is None:
        check_sizes("c", raw, Header(SHAPES))
    else:
        with pytest.raises(CheckpointError) as caught:
            check_sizes("c", raw, Header(SHAPES))
        assert told in str(caught.value)


def test_a_file_that_changed_is_no_longer_the_same(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"abc")
    stamps = stamps_of([path])
    check_stamps([path], stamps)
    assert len(sha256_files([path], stamps)) == 64
    path.write_bytes(b"abcd")
    with pytest.raises(CheckpointError, match="was changed"):
        check_stamps([path], stamps)
