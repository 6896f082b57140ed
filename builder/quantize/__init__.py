"""Quantization of a model's weights: schemes, calibration, rounding, the rewritten graph, and what it all costs.

`assignment` gives each weight a scheme. `calibrate` runs `texts` through the layers, one at a time, and records their
inputs, with which `numbers` quantizes the weights; `own_blocks` and `grids` keep those that are quantized already.
`rewrite` puts quantized weights into the graph, `linears` into the model that simulates it. `quality` and `sensitivity`
measure how far they move the model, `comparison` also the time of a step. `stage` does all of it for one model.
"""
