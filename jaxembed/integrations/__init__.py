"""Runs models inside other systems. Each module is for one of them, and is imported by its user."""
