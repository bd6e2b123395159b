"""Latency, throughput, size and memory of two models, measured in turns in one run."""
