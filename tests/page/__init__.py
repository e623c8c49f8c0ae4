"""The page at /playground in a real Chromium: `make page`."""
