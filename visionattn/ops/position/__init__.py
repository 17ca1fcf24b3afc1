"""Linear relative position: weights that depend on a query and on where a key lies from it."""
