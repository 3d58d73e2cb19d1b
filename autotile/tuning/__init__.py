"""Tuning sessions: from a kernel and its sizes to a verified winner in the database."""
