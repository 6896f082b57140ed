"""Headers tell a checkpoint's sizes, and a configuration that asks for others is refused by the field's name."""

import pytest
import torch
from safetensors.torch import save_file

from specbuild.builder.frontend.weights import Header, check_sizes, check_stamps, read_header, sha256_files, stamps_of
from specbuild.runtime.errors import CheckpointError

SHAPES = {"transformer.h.0.attn.weight": (8, 24), "transformer.h.1.attn.weight": (8, 24), "wte.weight": (97, 8)}


def test_a_header_tells_sizes(tmp_path):
    save_file({name: torch.zeros(shape) for name, shape in SHAPES.items()}, tmp_path / "a")
    found = read_header([tmp_path / "a"])
    assert dict(found.shapes) == SHAPES
    assert (found.layers, found.largest, found.elements) == (2, 97, 2 * 8 * 24 + 97 * 8)
    assert found.layer(2) == "transformer.h.2."
    assert (Header({}).layers, Header({}).largest, Header({}).elements) == (0, 0, 0)


def test_a_file_that_changed_is_no_longer_the_same(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"abc")
    stamps = stamps_of([path])
    check_stamps([path], stamps)
    assert len(sha256_files([path], stamps)) == 64
    path.write_bytes(b"abcd")
    with pytest.raises(CheckpointError, match="was changed"):
        check_stamps([path], stamps)
    with pytest.raises(CheckpointError, match="cannot be read"):
        sha256_files([tmp_path], stamps_of([tmp_path]))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n_layer": 2, "n_embd": 8, "vocab_size": 97, "n_positions": 1 << 20},
        {"sliding_window": 10**9, "num_positions": 10**9, "eos_token_id": 10**9},
    ],
)
def test_sizes_that_the_weights_have_or_do_not_tell(fields):
    check_sizes("c", {"model_type": "gpt2"} | fields, Header(SHAPES))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"n_layer": 3}, "n_layer 3, its weights have 2"),
        ({"n_layer": 2, "num_hidden_layers": 3}, "num_hidden_layers 3"),
        ({"n_embd": 98}, "n_embd 98, no dimension"),
        ({"n_positions": 1 << 32}, "n_positions 4294967296"),
        ({"deep": [{"n_things": 98}]}, "n_things 98"),
    ],
)
def test_other_sizes_are_refused(fields, named):
    with pytest.raises(CheckpointError, match=named):
        check_sizes("c", {"model_type": "gpt2"} | fields, Header(SHAPES))
