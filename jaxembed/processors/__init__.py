"""What turns inputs into encodings: text so far."""
