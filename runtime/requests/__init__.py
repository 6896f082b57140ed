"""Requests as data: prompts, chat templates, tokenization, validation, sequences, results and metrics."""
