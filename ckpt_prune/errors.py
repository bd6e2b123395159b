"""The errors a user is meant to read."""


class UserError(Exception):
    """Bad input: one line that names what is wrong and the remedy. The command line prints it and exits with code 2."""


class DiskError(UserError):
    """The disk is full or cannot be written: nothing is wrong with what was asked, and what is done may be kept."""
