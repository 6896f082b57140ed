"""Decoding on a device: rounds run where the models are, and the host reads one small copy of each."""
