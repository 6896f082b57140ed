"""The served models: engines by the names that requests give them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specbuild.runtime import AsyncEngine, Manifest
from specbuild.runtime.errors import OptionError
from specbuild.serve.errors import ApiError
from specbuild.serve.limits import LABEL_CHARACTERS

from .admission import Admission


@dataclass(frozen=True, slots=True)
class ServedModel:
    """An engine with its names, its sampling defaults, its queue, and how fast it decoded one text plainly."""

    names: tuple[str, ...]
    path: Path
    engine: AsyncEngine
    defaults: Mapping[str, Any]
    admission: Admission
    plain_rate: float | None = None  # tokens a second of plain decoding, measured in the warm-up
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def manifest(self) -> Manifest:
        """The bundle's manifest."""
        return self.engine.engine.manifest

    @property
    def name(self) -> str:
        """The first of its names, which responses and metrics use."""
        return self.names[0]


class Models:
    """Every served model, by name."""

    def __init__(self, models: list[ServedModel]) -> None:
        self.all = models
        self._by_name = {name: model for model in models for name in model.names}

    def pick(self, name: str | None) -> ServedModel:
        """Return the model that a request names; raises ApiError 404 if unknown, 400 if none of several is named."""
        if name is None and len(self.all) == 1:
            return self.all[0]
        if name is None:
            raise ApiError(400, f"several models are served, name one: {self._names()}", param="model")
        if name not in self._by_name:
            told = f"the model {name!r} is not served here; these are: {self._names()}"
            raise ApiError(404, told, param="model", code="model_not_found")
        return self._by_name[name]

    def _names(self) -> str:
        return ", ".join(self._by_name)


def names_of(bundles: list[str], served: tuple[str, ...]) -> list[tuple[tuple[str, ...], Path]]:
    """Return the names and the folder of each bundle.

    Args:
        bundles: Each bundle as FOLDER or NAME=FOLDER.
        served: Names of the only bundle, instead of its own.

    Raises:
        OptionError: If a name is unusable or given twice, or if `served` is given for several bundles.
    """
    if served and len(bundles) > 1:
        raise OptionError("--served-model-name names one bundle: of several give each as NAME=BUNDLE")
    named: list[tuple[tuple[str, ...], Path]] = []
    for each in bundles:
        name, equals, folder = each.partition("=")
        path = Path(folder if equals else each)
        names = served or (name if equals else path.resolve().name.removesuffix(".bundle"),)
        named.append((names, path))
    every = [name for each, _ in named for name in each]
    for name in every:
        if not 0 < len(name) <= LABEL_CHARACTERS or not name.isprintable():
            raise OptionError(f"a model's name has 1…{LABEL_CHARACTERS} printable characters, not {name[:80]!r}")
    if len({*every}) < len(every):
        raise OptionError(f"two models have one name ({', '.join(every)}): give each as NAME=BUNDLE")
    return named
