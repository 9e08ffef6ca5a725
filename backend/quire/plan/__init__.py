"""`quire plan`: predicts a configuration's capacity and finds its errors, without loading a model."""
