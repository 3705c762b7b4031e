"""Scenes in the manner of CLEVR: their sampling, and a renderer equal on every machine."""
