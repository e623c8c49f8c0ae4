"""Collects facts about a loaded model, and derives findings from them."""
