"""Measure the memory of models x sizes x passes x precisions, each cell in its own process; write
tables, plots and snapshots.
"""
