"""Publishing outputs to the Hugging Face Hub, and reading recipes from it."""
