"""Containers of outputs: model_type, config, remote code."""
