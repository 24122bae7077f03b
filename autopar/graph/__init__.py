"""What the program is: tracing, operators, factors, batch axes."""
