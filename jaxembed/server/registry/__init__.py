"""The models of a server: those in memory, and those that it may load."""
