"""Finds the grid of buckets that serves a traffic at least cost on this device."""
