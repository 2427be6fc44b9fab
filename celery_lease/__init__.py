"""Leases for Celery tasks: claimed atomically, renewed while the task runs, fenced at the end.

The public names of celery_lease. Everything else may change without notice,
except the submodules named in the documentation: ``exceptions``, ``signals``,
``receiver``, ``migrations`` and ``testing``.
"""

from __future__ import annotations

from celery_lease.exceptions import (
    AttemptsExhausted,
    DatabaseUnavailable,
    LeaseError,
    LeaseLost,
    LeaseNotGranted,
    OwnershipUnknown,
    SchemaOutdated,
    StaleFence,
    TaskCancelled,
)
from celery_lease.monitors import install as _install_monitors
from celery_lease.running import current_lease
from celery_lease.task import LeasedTask

__all__ = (
    "AttemptsExhausted",
    "DatabaseUnavailable",
    "LeaseError",
    "LeaseLost",
    "LeaseNotGranted",
    "LeasedTask",
    "OwnershipUnknown",
    "SchemaOutdated",
    "StaleFence",
    "TaskCancelled",
    "__version__",
    "current_lease",
)

__version__ = "0.1.0"

_install_monitors()
