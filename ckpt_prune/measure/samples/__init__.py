"""Samples: text, images and audio as a model is called with them."""
