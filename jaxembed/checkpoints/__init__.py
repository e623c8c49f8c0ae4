"""Checkpoints: where they come from, how they are stored and read."""
