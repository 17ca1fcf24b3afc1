"""Linear relative position: weights that depend on a query and on the offset of a key from it."""
