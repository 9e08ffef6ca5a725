"""Building blocks of models. A layer says which checkpoint tensor fills which of its weights (`weights`)."""
