"""The order of work, and how an array moves from one layout to another."""
