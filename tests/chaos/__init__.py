"""A seeded storm on a real server: faults beneath it, rude clients, signals, and an oracle.

Every request has one allowed outcome, and after the storm nothing is held. By hand, from the
repository: `python -m tests.chaos --seconds 3600 --seed 7 --model sentence-transformers/...`.
"""
