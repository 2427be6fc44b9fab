"""The app that worker processes import: `celery -A harness.worker_app worker`."""

from __future__ import annotations

from harness.apps import AppSettings, build

app = build(AppSettings.from_environment())
