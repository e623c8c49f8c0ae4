"""Command-line tools: doctor, tuning, verification, known models."""
