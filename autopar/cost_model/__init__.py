"""How long and how many bytes: collectives, operators, memory."""
