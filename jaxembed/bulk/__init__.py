"""Embeds, scores and classifies files, into one file of vectors or into a folder of Parquet that a
job goes on with where it was stopped. Knows no model but an Embedder."""
