"""Memory of models: what a cell of models x sizes x passes x precisions takes, alone in a process;
tables, plots, snapshots.
"""
