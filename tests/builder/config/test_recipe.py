"""Recipes: read, refused, and those in engines/ as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from specbuild.builder.config.recipe import read
from specbuild.cli.build import command
from specbuild.runtime.errors import OptionError

ROOT = Path(__file__).resolve().parents[3]
OPTIONS = {str(option.name) for option in command.params}
LISTS = {str(option.name) for option in command.params if option.multiple} | {"buckets"}


@pytest.mark.parametrize("path", sorted((ROOT / "engines").glob("*.toml")), ids=lambda path: path.stem)
def test_ours_name_options_and_folders_that_exist(path: Path) -> None:
    values = read(path, OPTIONS, LISTS)
    assert (Path(values["target"]) / "config.json").is_file()
    assert (Path(values["draft"]) / "config.json").is_file()
    assert {"backend", "precision"} <= values.keys()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("target = ", "is not TOML"),
        ("colour = 1", "has 'colour', which is no option of specbuild build"),
        ("[backend]\nname = 1", "has a table 'backend'"),
        ("max-seq-len = 8\nmax_seq_len = 9", "has 'max_seq_len' twice"),
        ("target = ['a']", "has a list for 'target': give one value"),
    ],
)
def test_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "r.toml").write_text(text)
    with pytest.raises(OptionError, match=message):
        read(tmp_path / "r.toml", OPTIONS)


def test_a_missing_one(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot be read"):
        read(tmp_path / "none.toml", OPTIONS)


def test_folders_are_the_recipes_own_and_hub_ids_stay(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    (tmp_path / "r.toml").write_text('target = "small"\ndraft = "someone/model"\nmax-seq-len = 64\ngpu = "any"')
    found = read(tmp_path / "r.toml", OPTIONS)
    assert found == {"target": str(tmp_path / "small"), "draft": "someone/model", "max_seq_len": "64"}
