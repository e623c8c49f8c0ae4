"""The routes, a file for each dialect."""
