"""Graphs in fewer bits: which weights can be, what each loses, what stays as it is, and how onnxruntime stores it."""
