"""A weight in a safetensors file is read by its place alone, in any type and by any rows."""

import json
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from specbuild.builder.frontend.lazy_weights import Stored
from specbuild.runtime.errors import CheckpointError

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.uint8]
SHAPES = [(), (3,), (4, 3), (5, 2, 3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("weights")


@given(st.sampled_from(DTYPES), st.sampled_from(SHAPES), st.lists(st.integers(0, 2), max_size=4))
def test_rows_are_those_of_the_tensor(folder, dtype, shape, picked):
    whole = torch.arange(1, 1 + max(1, int(np.prod(shape)))).reshape(shape).to(dtype)
    path = folder / f"{dtype}-{len(shape)}"
    if not path.exists():
        save_file({"other": torch.ones(7), "it": whole}, path)
    found = Stored(path, "it", shape)
    assert torch.equal(found.read(), whole.float())
    if shape:
        rows = [slice(0, 2), np.array(picked, dtype=np.int64)]
        for each in rows:
            assert torch.equal(found.read(each), whole.float()[each])


def test_a_file_larger_than_memory_is_read_in_its_places(tmp_path):
    path, size = tmp_path / "large", 1 << 42
    header = {
        "small": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "large": {"dtype": "BF16", "shape": [size // 2048, 1024], "data_offsets": [16, 16 + size]},
    }
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + np.arange(4, dtype=np.float32).tobytes())
        file.truncate(8 + len(text) + 16 + size)
    assert Stored(path, "small", (2, 2)).read().tolist() == [[0, 1], [2, 3]]
    last = Stored(path, "large", (size // 2048, 1024)).read(np.array([0, size // 2048 - 1]))
    assert torch.equal(last, torch.zeros(2, 1024))


def test_what_is_gone_is_told(tmp_path):
    save_file({"it": torch.ones(3)}, tmp_path / "a")
    for path, name in ((tmp_path / "a", "other"), (tmp_path / "b", "it")):
        with pytest.raises(CheckpointError, match="cannot be read"):
            Stored(path, name, (3,)).read()
