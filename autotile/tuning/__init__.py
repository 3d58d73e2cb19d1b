"""One tuning session, from a kernel and its sizes to a proven winner in the database."""
