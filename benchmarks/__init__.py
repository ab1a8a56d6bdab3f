"""One module a question. Each writes ratios, rows, machine and command, as `benchmarks.report` says."""
