"""`make attack`: hostile inputs of every kind against specbuild, for as long as asked, each replayable by its seed.

A worker process tries one case after another; the parent ends a worker that hangs, dies or takes too much memory, and
keeps what the case was made of. `attack.py` says what a class of attack is, `classes.py` which there are.
"""
