"""Building blocks of models, and the parts of a checkpoint's configuration that they need.

Linear layers and embeddings have a method `weights`, which names the checkpoint tensor that fills each of
their weights.
"""
