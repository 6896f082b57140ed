"""Quantization: what is asked for, calibration, the numbers, the graph's part of it, and what it cost.

`scheme` says how a weight is stored and computed with, `options` which weight has which scheme; `numbers` makes the
numbers, with what `calibrate` saw of the layers' inputs of some `texts`; `rewrite` puts them into the graph; `quality`
and `sensitivity` say what they change, `steps` what they are worth; `stage` is all of it for one model.
"""
