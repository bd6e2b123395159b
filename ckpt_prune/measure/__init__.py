"""Text, hidden states and the moments of what flows through a model."""
