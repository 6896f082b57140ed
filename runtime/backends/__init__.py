"""Whatever runs a model: the executor protocol, and what implements it on CPUs and GPUs."""
