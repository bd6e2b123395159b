"""Scores of units: higher = keep."""
