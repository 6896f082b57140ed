"""Recipes: the options of a build in a TOML file, such as `engines/*.toml`.

A recipe's keys are the options of `specbuild build`, plus `description` and `gpu`, which say what it is for. Folders
are relative to the recipe. Options on the command line override the recipe's.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from specbuild.builder.strict_json import read_text
from specbuild.runtime.errors import OptionError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RECIPE_BYTES = 1 << 20
SAYS = ("description", "gpu")
_FOLDERS = ("target", "draft", "adapter", "draft_adapter")


def read(path: Path, options: Collection[str], lists: Collection[str] = ()) -> dict[str, Any]:
    """Return a recipe's values as strings, by option.

    Args:
        path: The recipe.
        options: The command's options, with underscores.
        lists: Those of them that may be lists.

    Raises:
        OptionError: The recipe cannot be read, or has a key or value that is not allowed.
    """
    try:
        recipe = tomllib.loads(read_text(path, RECIPE_BYTES))
    except OSError as error:
        raise OptionError(f"{path} cannot be read ({error.strerror}): give a recipe, like those in engines/") from None
    except ValueError as error:
        raise OptionError(f"{path} is not TOML: {error}") from None
    except RecursionError:
        raise OptionError(f"{path} is not TOML for a recipe: nested too deeply") from None
    values: dict[str, Any] = {}
    for key, value in recipe.items():
        name = key.replace("-", "_")
        if name in SAYS:
            continue
        if isinstance(value, dict):
            raise OptionError(f"{path} has a table {key!r}: give one value, or a list")
        if name not in options:
            raise OptionError(f"{path} has {key!r}, which is no option of specbuild build")
        if name in values:
            raise OptionError(f"{path} has {name!r} twice")
        if isinstance(value, list) and name not in lists:
            raise OptionError(f"{path} has a list for {key!r}: give one value")
        values[name] = [_text(each) for each in value] if isinstance(value, list) else _text(value)
        if name in _FOLDERS and value and (path.parent / values[name]).is_dir():
            values[name] = str(path.parent / values[name])
    return values


def _text(value: Any) -> str:
    """Return a value as it would be given on the command line, by which it is checked."""
    return str(value).lower() if isinstance(value, bool) else str(value)
