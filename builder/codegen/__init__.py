"""Writes the compiled files of a bundle: graphs, engines and cubins, and the records of them."""
