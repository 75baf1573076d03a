"""The one exception for bad input: one sentence that says what was wrong, what is allowed and what to do."""


class InputError(ValueError):
    """Raised for anything a user can mend. The command line prints its sentence and exits with code 2."""
