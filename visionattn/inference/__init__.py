"""Features and predictions of image files, by any model, at any size: the commands that need no
labels.
"""
