"""The builder: Hugging Face checkpoints in, one bundle out. Its modules import torch; the package itself does not."""
