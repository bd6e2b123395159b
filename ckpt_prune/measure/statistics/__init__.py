"""Statistics: what is measured on the dense model, and the folder it is kept in."""
