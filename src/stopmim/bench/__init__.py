"""What is fast and what is not, measured on the machine at hand."""
