"""The worker's app, where acknowledgements wait for each other as long as the test says."""

import os

from celery_lease import acknowledge
from harness.worker_app import app

__all__ = ("app",)

acknowledge._WINDOW = float(os.environ["CELERY_LEASE_TEST_ACKNOWLEDGE_WINDOW"])
