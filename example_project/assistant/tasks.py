"""Two leased tasks and an ordinary one, in one queue."""

from celery.utils.log import get_task_logger

from assistant.celery import app
from assistant.outside import capture, stream
from celery_lease import LeasedTask

log = get_task_logger(__name__)


@app.task(base=LeasedTask, bind=True)
def ask(self, question):
    """Ask the model. A second worker goes on where a killed one stopped."""
    words = list((self.lease.details or {}).get("words", []))
    log.info("token %s starts at word %s", self.lease.fencing_token, len(words))
    for word in stream(question, skip=len(words)):
        words.append(word)
        # No I/O. Raises LeaseLost as soon as this worker does not own the task any more, so that
        # nobody pays for tokens that nobody will read. The details are saved with the next beat.
        self.lease.heartbeat(details={"words": words})
    return " ".join(words)


@app.task(base=LeasedTask, bind=True, lease_policy="payment")
def pay(self, invoice, cents):
    """Capture a payment: an effect outside the database, which no lease can take back."""
    # Does not begin unless ownership is certain. `effect.headers` are X-Execution-Fence, by which
    # the receiver refuses an overtaken worker, and Idempotency-Key, by which it recognizes a
    # second attempt. Both help only if the receiver checks them.
    with self.lease.effect("capture") as effect:
        receipt = capture(invoice, cents, headers=effect.headers)
    log.info("invoice %s is paid: %s", invoice, receipt)
    return receipt


@app.task
def file_away(answer):
    """Keep an answer: an ordinary task, here the callback of `ask`. Nothing about it changes."""
    log.info("filed away: %s words", len(answer.split()))
