"""The GPU backends: devices with memory, streams and graphs, compiled models, and the executor over them."""
