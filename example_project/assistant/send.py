"""Send tasks and wait for them: `python -m assistant.send ask|pay`."""

import sys

from assistant.tasks import ask, file_away, pay


def main(what):
    """Send one task, print its id, then its result."""
    if what == "ask":
        sent = ask.apply_async(["What is a lease?"], link=file_away.s())
    else:
        sent = pay.delay("invoice-7", 4200)
    print(sent.id, flush=True)
    print(sent.get(timeout=300))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "ask")
