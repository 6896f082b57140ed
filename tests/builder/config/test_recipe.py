"""Recipes: read, refused, and those in engines/ as they are."""

from pathlib import Path

import pytest

from specbuild.builder.config.recipe import read
from specbuild.cli.build import command
from specbuild.runtime.errors import OptionError

ROOT = Path(__file__).resolve().parents[3]
OPTIONS = {str(option.name) for option in command.params}
LISTS = {str(option.name) for option in command.params if option.multiple} | {"buckets"}


@pytest.mark.parametrize("path", sorted((ROOT / "engines").glob("*.toml")), ids=lambda path: path.stem)
def test_ours_name_options_and_folders_that_exist(path):
    values = read(path, OPTIONS, LISTS)
    assert (Path(values["target"]) / "config.json").is_file()
    assert (Path(values["draft"]) / "config.json").is_file()
    assert {"backend", "precision"} <= values.keys()


def test_folders_are_the_recipes_own_and_hub_ids_stay(tmp_path):
    (tmp_path / "small").mkdir()
    (tmp_path / "r.toml").write_text('target = "small"\ndraft = "someone/model"\nmax-seq-len = 64\ngpu = "any"')
    found = read(tmp_path / "r.toml", OPTIONS)
    assert found == {"target": str(tmp_path / "small"), "draft": "someone/model", "max_seq_len": "64"}


@pytest.mark.parametrize(
    "text",
    [
        "target = ",
        "colour = 1",
        "[backend]\nname = 1",
        "max-seq-len = 8\nmax_seq_len = 9",
        "target = ['a']",
        None,
    ],
)
def test_what_is_no_recipe_is_refused_in_one_line(tmp_path, text):
    path = tmp_path / "r.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(OptionError, match=f"^{path} ") as caught:
        read(path, OPTIONS)
    assert "\n" not in str(caught.value)
