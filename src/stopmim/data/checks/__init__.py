"""Reading every image once, to report problems: facts, copies, recorded hashes."""
