"""Recipes: builds written down as TOML, `engines/*.toml`.

A recipe's keys are those of `specbuild build`'s options, and `description` and `gpu`, which say what it is for. Folders
are relative to the recipe. Options on the command line go before the recipe's.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ..runtime.errors import OptionError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SAYS = ("description", "gpu")
_FOLDERS = ("target", "draft")


def read(path: Path, options: Collection[str]) -> dict[str, Any]:
    """The recipe's values for a command's `options`; raises OptionError for what is not TOML or not an option."""
    try:
        recipe = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"{path} cannot be read ({error.strerror}): give a recipe, like those in engines/") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionError(f"{path} is not TOML: {error}") from None
    values = {key.replace("-", "_"): value for key, value in recipe.items() if key not in SAYS}
    unknown = sorted(set(values) - set(options))
    if unknown:
        raise OptionError(f"{path} has {unknown[0]!r}, which is no option of specbuild build")
    for name, value in values.items():
        if isinstance(value, dict):
            raise OptionError(f"{path} has a table {name!r}: give one value, or a list")
        if name in _FOLDERS and isinstance(value, str) and (path.parent / value).is_dir():
            values[name] = str(path.parent / value)
    return values
