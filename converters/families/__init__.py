"""A file for each model type."""
