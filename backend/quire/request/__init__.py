"""Parameters and images of a request, and their validation."""
