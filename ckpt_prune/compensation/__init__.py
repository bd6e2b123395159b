"""Closed forms that make an output projection make up for its dropped inputs: pure functions of moments."""
