"""Shared by all commands: options, exit codes, files, provenance, tables, progress, processes."""
