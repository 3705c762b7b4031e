"""The foundation: errors, console, keyed randomness, schedules, files, untrusted weights."""
