"""ONNX graphs of whole models, and the proof that onnxruntime computes what PyTorch does."""
