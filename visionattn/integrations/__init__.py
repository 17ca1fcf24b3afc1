"""Run this package's work on other engines; each module needs the extra of its name."""
