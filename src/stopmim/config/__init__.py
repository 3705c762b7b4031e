"""Every knob of a run, complete runs as presets, the sizes of networks."""

from stopmim.config.schema import Config

__all__ = ["Config"]
