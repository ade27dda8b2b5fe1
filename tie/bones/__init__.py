"""bones: executes the model, one forward pass per scheduled batch. Imports nothing of the suite."""
