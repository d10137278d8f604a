"""Greedy decoding with a static KV cache, and answering questions about images with a finished phase."""
