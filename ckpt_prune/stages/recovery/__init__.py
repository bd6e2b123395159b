"""Training after pruning: LaCo and SNOWS block by block, scales of weights, LoRA."""
