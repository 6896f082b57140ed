"""Bundles on disk: manifest, hashes, signature, memory plan, and output that is written whole or not at all."""
