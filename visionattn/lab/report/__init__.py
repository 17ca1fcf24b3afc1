"""One page of HTML about runs, sweeps and memory profiles: the work of ``visionattn report``."""
