"""The models that a server has, and may load."""
