"""The steps that the requests of all routes have in common."""
