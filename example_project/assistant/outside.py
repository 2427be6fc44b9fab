"""What lies outside: stand-ins for a model and for a payment provider. Put your clients here."""

import os
import time

ANSWER = (
    "A task that runs for minutes needs an owner. The owner says every few seconds that it is"
    " still there. Once it says so no more, somebody else may take over, and whatever the first"
    " one still wants to write is refused, for it carries an old number."
)
SECONDS_PER_WORD = float(os.environ.get("SECONDS_PER_WORD", "0.5"))


def stream(question, *, skip=0):
    """Yield the answer's words as a model would, without those that were heard before."""
    del question
    for word in ANSWER.split()[skip:]:
        time.sleep(SECONDS_PER_WORD)
        yield word


def capture(invoice, cents, *, headers):
    """Capture a payment. The provider has to check both headers; see the README."""
    time.sleep(2)
    return f"{cents} cents of {invoice}, fence {headers['X-Execution-Fence']}"
