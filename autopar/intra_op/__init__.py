"""How to shard one stage on one mesh: an integer linear program."""
