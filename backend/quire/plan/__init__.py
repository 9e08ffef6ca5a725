"""`quire plan`: what a configuration will have room for, and what is wrong with it, without loading it."""
