"""Batches sequences and runs them on the devices. Knows nothing of text, HTTP or asyncio."""
