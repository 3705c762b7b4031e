"""One file per evaluation protocol."""
