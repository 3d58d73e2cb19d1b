"""One module for each migration, numbered in order; a released migration is never changed."""
