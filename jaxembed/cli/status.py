"""Exit statuses of the commands."""

EXIT_AGREES, EXIT_DISAGREES = 0, 1  # of `verify`
EXIT_HEALTHY, EXIT_FINDINGS = 0, 1  # of `doctor`
EXIT_REFUSED = 2  # of all: the command could not do what was asked
