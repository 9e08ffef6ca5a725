"""Checkpoints that other tools quantised: which tensors they store for a layer, and what these mean.

`rules` reads `quantization_config`, `formats` describes the stored tensors, `scheme` makes layers of them.
"""
