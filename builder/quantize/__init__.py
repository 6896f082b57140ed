"""Quantization of a model's weights: schemes, calibration, rounding, the rewritten graph, and what it all costs.

`assignment` gives each weight a scheme. `calibrate` runs `texts` through the layers and records their inputs, with
which `numbers` quantizes the weights; `grids` keeps those that are quantized already, and `offsets` what such a grid
adds to its blocks. `rewrite` puts quantized weights into the graph. `quality` and `sensitivity` measure how far they
move the model, `comparison` also the time of a step. `stage` does all of it for one model.
"""
