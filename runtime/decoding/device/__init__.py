"""Decoding where the models are: rounds on a device, of which the host reads one small copy each."""
