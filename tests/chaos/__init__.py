"""A chaos test: a real server with injected faults, misbehaving clients, signals, and an oracle.

Every request must have one allowed outcome, and after the storm the server must hold no resources.
By hand: `python -m tests.chaos --seconds 3600 --seed 7 --model sentence-transformers/...`.
"""
