"""Answers and perplexity of a real GGUF file, beside transformers and llama.cpp on the same file."""
