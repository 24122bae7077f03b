"""A GPT in plain Flax and Optax, trained on the sources of Python's own standard library."""
