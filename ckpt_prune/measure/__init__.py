"""Measure: samples, the streams of hidden states they make, moments of these, and the statistics folder."""
