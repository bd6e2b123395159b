"""The stage `hidden`: the residual stream is narrowed."""
