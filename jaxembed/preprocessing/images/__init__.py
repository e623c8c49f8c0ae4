"""Images as inputs: reads and decodes their files, and makes the patches that a backbone takes."""
