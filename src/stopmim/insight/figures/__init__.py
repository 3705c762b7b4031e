"""One module per family of figures."""
