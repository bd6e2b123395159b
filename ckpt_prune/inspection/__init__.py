"""What a checkpoint is, in figures: the answer of `inspect`."""
