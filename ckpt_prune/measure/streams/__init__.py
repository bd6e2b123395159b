"""Streams: the hidden states of all samples, carried through a model one block at a time."""
