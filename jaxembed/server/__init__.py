"""The HTTP server. It answers requests in the formats of several APIs with the loaded models."""
