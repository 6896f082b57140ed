"""Sampling: parameters, logit processors, the choice of a token, constraints and log-probabilities."""
