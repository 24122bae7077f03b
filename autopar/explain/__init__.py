"""What was decided, why, and was the prediction right."""
