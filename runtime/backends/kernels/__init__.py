"""Our CUDA kernels: their C interface, and the cubins of a bundle."""
