"""Runs models inside other systems. Each module is for one system; only its users import it."""
