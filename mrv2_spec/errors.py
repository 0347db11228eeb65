"""The error that a user can act on."""


class UserError(Exception):
    """Say in one line what is wrong, which setting it concerns and what helps.

    The command line prints the message without a traceback and exits with 1.
    """
