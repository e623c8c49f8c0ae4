"""Loads models, makes requests to the models from validated options, and runs the requests."""
