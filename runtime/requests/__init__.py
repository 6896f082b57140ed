"""A request as data: prompts, chat templates, tokens, validation, sequences, results, metrics."""
