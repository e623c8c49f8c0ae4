"""Tells why a server is slow: collects facts of each model, derives findings and prints a page."""
