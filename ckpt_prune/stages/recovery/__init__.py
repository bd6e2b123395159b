"""Training after pruning: LaCo block by block, scales of weights, LoRA."""
