"""What an output is stored as: container, config, remote code."""
