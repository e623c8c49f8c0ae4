"""What is read beside the weights: labels, adapters, token and term heads, static embeddings."""
