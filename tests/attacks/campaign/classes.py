"""The classes of attack, each imported when a worker prepares it."""

import importlib

CLASSES = (
    *("manifest", "graphs", "timings", "tokenizer", "templates", "checkpoints"),
    *("prompts", "parameters", "structures", "http", "races", "signals"),
)
# Races wait for others, each no longer than 10 s. An ambiguous grammar may take a second for a token. Signals are
# several commands, each with a limit of its own by what it computes, so that a machine with other work does no harm.
# All else has 10 s.
LIMITS = {"races": 30.0, "structures": 60.0, "signals": 1200.0}


def make(name, bench):
    """Prepare a class: `name` is one of `CLASSES`, or `module:Class`, which tests plant."""
    module, _, kind = name.partition(":")
    if not kind:
        module, kind = f"{__package__}.{name}", f"{name.capitalize()}Attack"
    made = getattr(importlib.import_module(module), kind)(bench)
    return made


def limit(name):
    """Seconds that a case of a class may take, without preparing it."""
    return LIMITS.get(name, 10.0)
