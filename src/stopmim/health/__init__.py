"""Whether a run is healthy: measured during training, judged by rules, compared with references."""
