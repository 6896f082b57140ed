"""A clock that says anything at all, for what no token may depend on."""

import random


def bewitch(executor, seed):
    """From now on an executor's `seconds` are random: steps take ages, nothing, or less than that."""
    drawn = random.Random(seed)
    told = property(lambda self: drawn.choice([0.0, -5.0, 1e-9, 1e9, drawn.random()]), lambda self, value: None)
    executor.__class__ = type("Bewitched", (type(executor),), {"seconds": told})
