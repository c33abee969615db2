"""Convert any module into a network that is a function of an input and theta."""
