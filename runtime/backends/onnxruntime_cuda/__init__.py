"""ONNX Runtime on a GPU: one graph in a session, or a model in parts around our attention."""
