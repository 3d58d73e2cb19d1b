"""One file a step, numbered in order; a step that was released is never changed."""
