"""Run this package's work on Ray, which the extra ``ray`` installs."""
