"""The worker's app with Celery's own default for prefetching, which the harness sets to one."""

from harness.worker_app import app

__all__ = ("app",)

del app.conf.changes["worker_prefetch_multiplier"]
