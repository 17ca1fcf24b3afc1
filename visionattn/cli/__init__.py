"""What every tool shares: command lines, ends and exit codes, files, provenance, tables, progress,
fresh processes.
"""
