"""Turns the inputs of requests into encodings. So far they are texts, pairs and token ids."""
