"""Sharing outputs and recipes through the Hub: what goes there, where to, and the card that it goes with."""
