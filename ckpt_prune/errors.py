"""The one error a user is meant to read."""


class UserError(Exception):
    """Bad input: one line that names what is wrong and the remedy. The command line prints it and exits with code 2."""
