"""Images as requests give them: their files, and the patches of a tower."""
