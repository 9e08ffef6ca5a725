"""Building blocks of models, and the parts of a checkpoint's configuration that they need.

Linear layers and embeddings have a method `weights`, which yields the tensors to be filled from a checkpoint,
with their names.
"""
