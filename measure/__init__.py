"""Measurements of bundles: benchmarks, tuning, rooflines, exactness, costs and canary statistics. Needs no torch."""
