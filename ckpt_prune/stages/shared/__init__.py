"""What several stages use."""
