"""Plain Celery: what the others are measured against. Never imports celery_lease."""

from benchmarks.settings import make_app, noop, time_to_start

app, _ = make_app()
app.task(name="noop")(noop)
app.task(name="time_to_start")(time_to_start)
