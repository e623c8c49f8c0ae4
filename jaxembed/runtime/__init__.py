"""A loaded model: what a request means for it, and how it is answered."""
