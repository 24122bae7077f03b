"""How to run a Plan: compile and call."""
