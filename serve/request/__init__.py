"""One request: its body, room in the queue, parameters, and its way through an engine."""
