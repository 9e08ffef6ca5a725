"""Offline quantisation: checkpoints of compressed-tensors' kind, and what they cost."""
