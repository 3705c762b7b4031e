"""Health of a run: measured during training, judged by rules, compared with reference runs."""
