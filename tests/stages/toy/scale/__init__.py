"""The stage `scale`."""
