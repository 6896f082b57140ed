"""`specbuild distill`: a draft for any target, trained to say what the target says."""
