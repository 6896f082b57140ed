"""The server on several machines, as replicas of Ray Serve."""
