"""Small modules that every room may use; they import no other room."""
