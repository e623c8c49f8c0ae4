"""Runs a front-end process: `python -m jaxembed.server.front CHANNEL LISTENER`."""

import sys

from jaxembed.server.front.process import main

main(*map(int, sys.argv[1:]))
