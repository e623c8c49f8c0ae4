"""Finds the grid of buckets that serves given traffic at the least cost on this device."""
