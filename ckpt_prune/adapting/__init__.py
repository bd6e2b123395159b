"""LoRA after pruning: adapters trained by peft on the model as a whole, merged into its weights."""
