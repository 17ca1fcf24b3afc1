"""Content and position of all pairs of queries and keys in one matrix: the fastest for small images
on a CPU.
"""
