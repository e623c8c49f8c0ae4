"""Reads or builds tokenizer.json."""
