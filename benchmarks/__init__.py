"""Measurements of autopar, and the models on which they are made."""
