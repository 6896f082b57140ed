"""Parameters, logit processors, the one choice and log-probabilities: pure."""
