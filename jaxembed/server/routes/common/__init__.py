"""What the routes of several dialects share."""
