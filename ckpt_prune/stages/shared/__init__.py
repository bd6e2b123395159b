"""Code that several stages use."""
