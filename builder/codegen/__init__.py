"""From a lowered graph to files: engines, cubins, and the records of them."""
