"""`specbuild distill`: trains a draft for any target to predict what the target generates."""
