"""The HTTP routes: a module for each API dialect, and others for operators."""
