"""Files of somebody else's: regular, of bounded size, strict JSON."""

import os

import pytest

from specbuild.builder.strict_json import decode, read_object, read_text, refusing
from specbuild.runtime.errors import CheckpointError


def test_a_text_is_read_up_to_a_limit(tmp_path):
    path = tmp_path / "a"
    path.write_text("größer", encoding="utf-8")
    assert read_text(path, 8) == "größer"
    with pytest.raises(ValueError, match="more than"):
        read_text(path, 7)
    path.write_bytes(b"\xff")
    with pytest.raises(UnicodeDecodeError):
        read_text(path)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        read_text(tmp_path / "pipe")


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 5000, "NaN", '"\\ud800"', "\ud800", "", "1 2"])
def test_what_is_not_strict_is_refused(text):
    with pytest.raises(ValueError, match=r"\w"):
        decode(text)


def test_real_numbers_of_real_configurations_are_read():
    assert decode('{"model_max_length": 1000000000000000019884624838656}') == {
        "model_max_length": 1000000000000000019884624838656
    }


def test_an_object_or_nothing(tmp_path):
    assert read_object(tmp_path / "none") == {}
    (tmp_path / "a").write_text('{"a": 1}')
    assert read_object(tmp_path / "a") == {"a": 1}
    (tmp_path / "a").write_text("5")
    with pytest.raises(CheckpointError, match="is not a JSON object"):
        read_object(tmp_path / "a")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_object(tmp_path)


def test_whatever_is_raised_becomes_one_line():
    class Panic(BaseException):
        """As of tokenizers, written in Rust."""

    with pytest.raises(CheckpointError, match=r"^it failed: a b$"), refusing("it failed"):
        raise Panic("a\nb")
    with pytest.raises(KeyboardInterrupt), refusing("it failed"):
        raise KeyboardInterrupt
