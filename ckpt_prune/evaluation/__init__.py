"""What a checkpoint is worth: perplexity, tasks, and parity with another; the one room that loads whole models."""
