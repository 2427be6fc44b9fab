"""What tests share: servers, databases, real workers, a journal, faults.

Nothing here is collected as a test; `tests/conftest.py` turns it into fixtures, and
`tests/integration/test_harness.py` tests it. Worker processes import `harness` too, so the folder
`tests` is put on their PYTHONPATH.
"""
