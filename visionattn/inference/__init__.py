"""Features and predictions of images in files, by any model, at any size: the work of the tools
that need no labels.
"""
