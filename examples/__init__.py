"""Training scripts that an ordinary user would write, and what changes in them to run on many devices."""
