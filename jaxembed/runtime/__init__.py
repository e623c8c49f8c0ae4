"""Loads models, makes requests to them from validated options, and runs these."""
