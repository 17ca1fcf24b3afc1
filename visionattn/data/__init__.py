"""Images: which a data set names, how they are split, read, augmented and put into batches."""
