"""The same tasks with `base=LeasedTask` and default settings."""

from benchmarks.settings import make_app, noop, time_to_start
from celery_lease import LeasedTask

app, _settings = make_app()
app.conf.lease_url = _settings.database_url
app.task(base=LeasedTask, name="noop")(noop)
app.task(base=LeasedTask, name="time_to_start")(time_to_start)
