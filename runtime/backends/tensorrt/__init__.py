"""TensorRT and TensorRT-RTX: plans, their contexts, paged caches. No engine has run on a card yet."""
