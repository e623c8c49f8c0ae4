"""Batches tokenized sequences and runs the batches on devices."""
