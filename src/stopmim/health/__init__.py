"""Whether a run is healthy: measured while it trains, judged by rules, beside runs of ours."""
