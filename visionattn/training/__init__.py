"""Train models: configuration, training loop, checkpoints, evaluation. Lower packages never import
this one.
"""
