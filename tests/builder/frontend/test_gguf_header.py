"""Headers of GGUF files: what they say, and that absurd ones are refused at once."""

import os
import struct
import time

import pytest
from tiny_gguf import write_gguf

from specbuild.builder.frontend.gguf_header import read_header
from specbuild.runtime.errors import CheckpointError

BILLION = 10**9


@pytest.fixture(scope="module")
def sound(make_checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    return write_gguf(make_checkpoint(folder / "tiny", num_hidden_layers=1, intermediate_size=64), folder / "a.gguf")


def head(tensors=0, entries=0, version=3):
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries)


def text(value):
    return struct.pack("<Q", len(value)) + value


def entry(kind, value):
    return text(b"key") + struct.pack("<I", kind) + value


def tensor(dims, name=b"a.weight"):
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, 0, 0)


def test_what_a_header_says(sound):
    header = read_header(sound)
    assert header.metadata["general.architecture"] == "llama"
    assert header.metadata["llama.block_count"] == 1
    assert header.metadata["tokenizer.ggml.tokens"] == 4096  # of a list its length
    assert {each.name: each.shape for each in header.tensors}["token_embd.weight"] == (32, 4096)
    assert header.data % 32 == 0
    assert header.size == sound.stat().st_size


def test_every_cut_within_the_header_is_refused(sound, tmp_path):
    content, path = sound.read_bytes(), tmp_path / "cut.gguf"
    end = read_header(sound).data - 32  # what follows is padding
    for size in [*range(0, 64, 7), *range(64, end, 9973), end]:
        path.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match=r"cut off within its header|is a file, and no GGUF"):
            read_header(path)


ABSURD = {
    "no GGUF": (b"{}" * 40, "no GGUF"),
    "empty": (b"", "no GGUF"),
    "version": (head(version=1), "version 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version"),
    "tensors": (head(tensors=BILLION), f"{BILLION} tensors"),
    "entries": (head(entries=BILLION), f"{BILLION} entries"),
    "key": (head(entries=1) + struct.pack("<Q", BILLION), "a name of"),
    "text": (head(entries=1) + entry(8, struct.pack("<Q", 2**62)), "a name of"),
    "list": (head(entries=1) + entry(9, struct.pack("<IQ", 0, BILLION)), f"list of {BILLION} values"),
    "list of texts": (head(entries=1) + entry(9, struct.pack("<IQ", 8, BILLION)), f"list of {BILLION} values"),
    "text in a list": (head(entries=1) + entry(9, struct.pack("<IQQ", 8, 1, 2**62)), "header of more than|cut off"),
    "lists": (head(entries=1) + entry(9, struct.pack("<IQ", 9, 1)), "lists in lists"),
    "type": (head(entries=1) + entry(77, b""), "unknown type 77"),
    "not UTF-8": (head(entries=1) + text(b"\xff"), "no UTF-8"),
    "dimensions": (head(tensors=1) + text(b"a") + struct.pack("<I", BILLION), "no possible shape"),
    "no dimension": (head(tensors=1) + tensor(()), "no possible shape"),
    "zero": (head(tensors=1) + tensor((0, 2)), "no possible shape"),
    "overflow": (head(tensors=1) + tensor((2**40, 2**40)), "no possible shape"),
    "alignment": (head(entries=1) + text(b"general.alignment") + struct.pack("<II", 4, 3), "no power of two"),
}


@pytest.mark.parametrize("case", ABSURD)
def test_absurd_headers_are_refused_at_once(case, tmp_path):
    """In a sparse file too, which has room for whatever its header says."""
    content, expected = ABSURD[case]
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    for message in (expected, f"{expected}|header of more than"):
        before = time.monotonic()
        with pytest.raises(CheckpointError, match=f"^.*({message}).*$"):
            read_header(path)
        assert time.monotonic() - before < 10
        if len(content) > 4:
            os.truncate(path, 1 << 40)


def test_what_is_no_file_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_header(tmp_path / "missing")
