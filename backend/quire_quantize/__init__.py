"""Offline quantisation: writes checkpoints in compressed-tensors' format, and measures perplexity."""
