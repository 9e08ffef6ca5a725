"""GGUF files as checkpoints: reads their metadata as a configuration, and their tensors as a model's weights.

`quire_common.gguf_file` reads a file's head and bytes, `quire_ensemble.gguf_tokenizer` its tokenizer.
"""
