"""Sources of images: one file per kind or family of kinds, listed in open.py."""
