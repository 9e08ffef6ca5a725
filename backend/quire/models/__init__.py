"""Model families: one config-driven decoder, and a short file for each family that differs."""
