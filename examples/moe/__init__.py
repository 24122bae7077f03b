"""A mixture-of-experts language model on the data, tokenizer and checkpoints of the GPT example."""
