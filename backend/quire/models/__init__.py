"""Model families: a decoder and an encoder that many families share, the families' own files, and
transformers' code for others."""
