"""Benchmarks of training steps, loading and evaluation on this machine."""
