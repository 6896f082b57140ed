"""Executors that run a bundle's models: the protocol, and its implementations for CPUs and GPUs."""
