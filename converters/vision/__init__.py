"""Models of texts and images, and of pages."""
