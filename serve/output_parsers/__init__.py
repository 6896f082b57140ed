"""Parsers that read a model's turn from its text as it arrives: reasoning, content and tool calls."""
