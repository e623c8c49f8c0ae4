"""Facts of a loaded model, and what is wrong with it."""
