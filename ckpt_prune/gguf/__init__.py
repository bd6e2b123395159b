"""GGUF files: written, proven in llama.cpp, and read."""
