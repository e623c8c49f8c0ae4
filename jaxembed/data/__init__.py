"""What packages pass to each other: inputs, sequences, outputs, and the spec of a model."""
