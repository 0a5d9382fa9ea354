"""Speed as ratios taken in one run: `python -m benchmarks`. See docs/internals/benchmarks.md."""
