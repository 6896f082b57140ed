"""The project's CUDA kernels: their C interface, and the cubins in a bundle."""
