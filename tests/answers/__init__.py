"""Records what servers answer over HTTP, to compare it before and after a change."""
