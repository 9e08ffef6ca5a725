"""Processing between token ids and what callers see: text, stop strings, outputs."""
