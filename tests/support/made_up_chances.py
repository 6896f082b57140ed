"""Chances of a timing table as tests of the policy have them."""

from __future__ import annotations

CHANCES = {
    "likely": [-8.0, -2.0, -1.0, -0.5, -0.1, 0.0],
    "chance": [0.01, 0.1, 0.35, 0.6, 0.85, 0.95],
    "step": 0.75,
    "reach": [0, 0.75, 1.3, 1.7, 2.0, 2.2, 2.35, 2.45, 2.5],
    "lookup": [0.0, 0.3, 0.5, 0.6, 0.7, 0.75],
}
