"""specbuild: exact speculative decoding, compiled ahead of time.

    from specbuild import Engine, SamplingParams

    with Engine.load("pycode.bundle") as engine:
        print(engine.generate("def main(", SamplingParams(max_new_tokens=64))[0].text)

The public names are Engine, AsyncEngine, SamplingParams, StructuredOutputs, Chat, Limits, __version__ and the errors.
Each is imported on first use, so that `import specbuild` costs next to nothing. `specbuild.runtime` exports the types
that these names take and return.
"""

from __future__ import annotations

import os

# ONNX Runtime reads this when it is imported, and would report to its maker. Every process of ours imports this first.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# Type checkers know this name. Importing `typing` takes milliseconds, in which Ctrl-C would still show a traceback.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from specbuild.runtime import AsyncEngine as AsyncEngine
    from specbuild.runtime import Chat as Chat
    from specbuild.runtime import Engine as Engine
    from specbuild.runtime import Limits as Limits
    from specbuild.runtime import SamplingParams as SamplingParams
    from specbuild.runtime import StructuredOutputs as StructuredOutputs
    from specbuild.runtime.errors import BundleError as BundleError
    from specbuild.runtime.errors import CheckpointError as CheckpointError
    from specbuild.runtime.errors import EngineClosedError as EngineClosedError
    from specbuild.runtime.errors import ExecutionError as ExecutionError
    from specbuild.runtime.errors import InputError as InputError
    from specbuild.runtime.errors import OptionError as OptionError
    from specbuild.runtime.errors import OutputError as OutputError
    from specbuild.runtime.errors import PromptError as PromptError
    from specbuild.runtime.errors import QueueFullError as QueueFullError
    from specbuild.runtime.errors import SpecbuildError as SpecbuildError

    __version__: str

_ERRORS = (
    *("BundleError", "CheckpointError", "EngineClosedError", "ExecutionError", "InputError", "OptionError"),
    *("OutputError", "PromptError", "QueueFullError", "SpecbuildError"),
)
_LAZY = ("AsyncEngine", "Chat", "Engine", "Limits", "SamplingParams", "StructuredOutputs", "__version__", *_ERRORS)


def __getattr__(name: str) -> Any:
    """Import a public name on first use; raise AttributeError for any other name."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "__version__":
        from importlib.metadata import version

        return version("specbuild-trt")
    from specbuild import runtime
    from specbuild.runtime import errors

    return getattr(errors if name in _ERRORS else runtime, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
