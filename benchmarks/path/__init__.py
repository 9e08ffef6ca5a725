"""What the way of a token through Triton costs, beside the least that it can cost."""
