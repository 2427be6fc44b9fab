"""The app: `celery -A assistant worker` finds it here."""

from celery import Celery

app = Celery("assistant", include=["assistant.tasks"])
app.config_from_object("assistant.settings")
