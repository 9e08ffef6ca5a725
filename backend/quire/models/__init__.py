"""Model families: a config-driven decoder, an encoder, a short file for each family, and transformers' code
for the rest."""
