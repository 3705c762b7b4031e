"""Encoders and models in files, ours and other people's: load, inspect, export."""
