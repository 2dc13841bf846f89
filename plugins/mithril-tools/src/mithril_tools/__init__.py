"""Tools: profiling, comparison, tuning, benchmarks, observers that print, and the command line."""
