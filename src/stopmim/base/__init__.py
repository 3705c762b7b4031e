"""What everything stands on: errors, console, keyed randomness, schedules, files of strangers."""
