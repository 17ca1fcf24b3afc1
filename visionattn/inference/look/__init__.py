"""Where the evidence for a class lies in images of files: the work of ``visionattn look``."""
