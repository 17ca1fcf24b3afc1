"""Images that are larger than the memory of one forward pass or of one process: exact, by strips of
rows of patches (bands in time, processes in space), or by overlapping tiles of any model.
"""
