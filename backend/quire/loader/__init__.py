"""Reading checkpoints: what a directory or file holds (`info`, torch-free) and its weights (`load`)."""
