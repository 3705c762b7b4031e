"""Triton kernels, one file each with its mathematics first. Importing them needs triton."""
