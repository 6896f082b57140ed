"""A bundle on disk: manifest, hashes, memory plan, writing it as a whole or not at all."""
