"""Sources of images: one file per kind, listed in open.py."""
