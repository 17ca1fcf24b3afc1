"""Images larger than the memory of one forward pass or of one process.

They are computed exactly, by strips of rows of patches (bands in time, processes in space), or by
overlapping tiles for any model.
"""
