"""The same tasks under a lease written by hand. Never imports celery_lease."""

from benchmarks.handwritten import HandwrittenLease, HandwrittenTask
from benchmarks.settings import make_app, noop, time_to_start

app, _settings = make_app()


class LeasedByHand(HandwrittenTask):
    """The app's own base class."""

    abstract = True
    claims = HandwrittenLease(_settings.database_url.replace("postgresql+psycopg:", "postgresql:"))


app.task(base=LeasedByHand, name="noop")(noop)
app.task(base=LeasedByHand, name="time_to_start")(time_to_start)
