"""Moments: sums over tokens that add, of inputs, of queries and keys, of rotary pairs and of routers."""
