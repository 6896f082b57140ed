"""Benchmarks, tuning, roofline and exactness: whatever is measured of a bundle. Needs no torch."""
