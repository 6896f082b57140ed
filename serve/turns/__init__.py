"""What a model says in its turn, read from its text as it comes: reasoning, content and calls of tools."""
