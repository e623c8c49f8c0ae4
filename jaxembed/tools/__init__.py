"""Tools beside the server: doctor, tuning, verification, known models."""
