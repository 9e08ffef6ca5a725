"""The parts of a request that say what a client asks for, and the checks of them."""
