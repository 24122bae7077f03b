"""How to cut the batch, the model and the cluster."""
