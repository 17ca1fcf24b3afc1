"""Other engines that run this package's work: each module needs the extra of its name."""
