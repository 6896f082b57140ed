"""specbuild: exact speculative decoding, compiled ahead of time.

    from specbuild import Engine, SamplingParams

    with Engine.load("pycode.bundle") as engine:
        print(engine.generate("def main(", SamplingParams(max_new_tokens=64))[0].text)

Whatever is no error is imported when it is first used, so that `import specbuild` costs next to nothing.
`specbuild.runtime` has these names too, and the types around them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specbuild import runtime
from specbuild.runtime.errors import (
    BundleError,
    CheckpointError,
    EngineClosedError,
    ExecutionError,
    InputError,
    OptionError,
    OutputError,
    PromptError,
    QueueFullError,
    SpecbuildError,
)

if TYPE_CHECKING:
    from specbuild.runtime import AsyncEngine, Chat, Engine, Limits, SamplingParams

    __version__: str

__all__ = [
    "AsyncEngine",
    "BundleError",
    "Chat",
    "CheckpointError",
    "Engine",
    "EngineClosedError",
    "ExecutionError",
    "InputError",
    "Limits",
    "OptionError",
    "OutputError",
    "PromptError",
    "QueueFullError",
    "SamplingParams",
    "SpecbuildError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """A public name, from where it is defined."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("specbuild-trt")
    else:
        value = getattr(runtime, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
