"""Images: datasets, splits, reading, augmentation and batches."""
