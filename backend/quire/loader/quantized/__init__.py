"""Checkpoints that others quantised: which tensors a layer has in them, and what these mean.

`config` reads `quantization_config`, `formats` knows the stored tensors, `scheme` makes layers of them.
"""
