"""Measures the promised figures, with real workers, and fails below them.

Run by `tox -e benchmarks`. Workers import this package too: by `-A benchmarks.leased_app` and its
siblings, which know as little of one another as three projects would.
"""
