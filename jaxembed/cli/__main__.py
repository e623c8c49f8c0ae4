"""Runs the command line as `python -m jaxembed.cli`."""

from jaxembed.cli import main

main()
