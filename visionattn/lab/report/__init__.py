"""Write the HTML page of ``visionattn report`` about runs, sweeps and memory profiles."""
