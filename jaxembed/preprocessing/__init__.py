"""Turns the inputs of requests (texts, pairs, token ids and images) into encodings."""
