"""Every error specbuild raises on purpose.

    SpecbuildError            exit status 1: it failed, and not because of what was asked
    ├── ExecutionError        a compiled model could not be run, or gave what is no logits
    ├── EngineClosedError     an engine was used after it had been closed, or while it drains
    ├── QueueFullError        no room in an engine's queue, and the caller would not wait
    └── InputError            exit status 2: what was asked for cannot be done
        ├── OptionError       a flag, parameter, tree, precision or backend
        ├── PromptError       a prompt or a prompt file
        ├── CheckpointError   a model folder
        ├── BundleError       a bundle: missing, damaged, too new
        └── OutputError       a place to write to

The message is one line that says what is wrong and what to do about it.
"""


class SpecbuildError(Exception):
    """The root of the tree; `exit_status` is what the CLI returns."""

    exit_status = 1


class ExecutionError(SpecbuildError):
    """A backend could not run a compiled model, or the model gave NaN or infinity for the token to emit."""


class EngineClosedError(SpecbuildError):
    """An engine was used after it had been closed, or was asked for more while it drains."""


class QueueFullError(SpecbuildError):
    """A request found no room in an engine's queue, and was not to wait for any."""


class InputError(SpecbuildError):
    """What was asked for cannot be done."""

    exit_status = 2


class OptionError(InputError):
    """A flag, sampling parameter, tree, precision or backend that does not exist or is out of range."""


class PromptError(InputError):
    """A prompt, or a line of a prompt file, that cannot be used."""


class CheckpointError(InputError):
    """A model folder that is missing, damaged or of an unsupported kind."""


class BundleError(InputError):
    """A bundle that is missing, damaged, unsafe, or written by a newer specbuild."""


class OutputError(InputError):
    """An output folder that exists, cannot be written, or is full."""


MAX_LINE = 400  # characters of another library's error


def one_line(error: BaseException) -> str:
    """The first paragraph of another library's error on one line, cut, with its kind where that alone says little."""
    text = " ".join(str(error).split("\n\n")[0].split())
    text = text if " " in text else f"{type(error).__name__} {text}".rstrip()
    return text if len(text) <= MAX_LINE else f"{text[: MAX_LINE - 1]}…"
