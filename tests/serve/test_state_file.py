"""State files: written as a whole, and nothing but one's own is read."""

import pytest

from specbuild.runtime.errors import OptionError, OutputError
from specbuild.serve import state_file


@pytest.mark.parametrize("text", ["", "[]", "{", '{"of": NaN}', "null"])
def test_what_is_no_state_is_refused(tmp_path, text):
    path = tmp_path / "state.json"
    path.write_text(text)
    with pytest.raises(OptionError, match=r"state\.json"):
        state_file.load(path, {"of": "a"})


def test_places_that_are_none(tmp_path):
    with pytest.raises(OptionError, match="cannot be read"):
        state_file.load(tmp_path, {})
    with pytest.raises(OutputError):
        state_file.store(tmp_path / "no" / "state.json", {}, {})
    kept = tmp_path / "kept.json"
    state_file.store(kept, {}, {"of": 1})
    with pytest.raises(OutputError, match="MiB"):
        state_file.store(kept, {}, {"of": "x" * (64 << 20)})
    assert state_file.load(kept, {}) == {"of": 1}, "what could not be read back is not written"
    with pytest.raises(ValueError, match="JSON"):
        state_file.store(tmp_path / "state.json", {}, {"bad": float("nan")})
    assert "give another file" in str(state_file.unusable(tmp_path, ValueError("x")))
