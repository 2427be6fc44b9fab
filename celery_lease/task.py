"""``base=LeasedTask``: a Celery task whose every run holds a lease.

The lease goes *around* whatever the task's own classes do in ``__call__``
(Flask's application context, a transaction): what they do after the body must
have happened before the outcome is accepted. So every ``__call__`` below
:class:`LeasedTask` is wrapped; the outermost one that is called takes the
lease, and the inner ones find it taken.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from celery import signals as celery_signals
from celery.app.task import Task
from celery.exceptions import Ignore, Reject

from celery_lease.accepted import ask_as_usual
from celery_lease.admission import Admission
from celery_lease.exceptions import LeaseLost
from celery_lease.execution import Execution
from celery_lease.handover import hand_on, replaced_by, sent_on, stand_in
from celery_lease.message import DISPATCH_HEADER
from celery_lease.options import is_housekeeping, settings_of
from celery_lease.running import RunningLease, StandInLease
from celery_lease.runtime import Runtime, flush_all
from celery_lease.worker import install

if TYPE_CHECKING:
    from celery import Celery

__all__ = ("LeasedTask",)

_EXECUTION = "_lease_execution"


def _leased(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap one ``__call__``: take the lease unless an outer one has."""

    @functools.wraps(call)
    def leased(self: LeasedTask, *args: Any, **kwargs: Any) -> Any:
        return self._call_leased(functools.partial(call, self), args, kwargs)

    leased.__lease_wrapped__ = True  # type: ignore[attr-defined]
    return leased


class LeasedTask(Task):  # type: ignore[type-arg]
    """Base class of leased tasks: ``@app.task(base=LeasedTask)``.

    Every ``lease_*`` setting but the app-wide ones can be a task option, e.g.
    ``@app.task(base=LeasedTask, lease_duration=300, lease_margin=30)``.
    """

    abstract = True

    #: A message stays with the broker until its outcome is accepted.
    acks_late = True
    #: The main process knows what a lease is.
    Request = "celery_lease.request:LeasedRequest"
    #: Told apart by this, so that no import is needed where only tasks are at hand.
    is_leased = True
    #: ``track_started``, taken over: a copy that is turned away must not write STARTED.
    tracks_started = False

    #: L: how long one renewal lasts, in seconds.
    lease_duration: float | None = None
    #: H: seconds between two renewals.
    lease_heartbeat_interval: float | None = None
    #: R: renewals in a row that may fail.
    lease_missed_heartbeats: int | None = None
    #: J: seconds of margin for jitter, pauses and an overloaded database.
    lease_margin: float | None = None
    #: Name of a set in ``lease_policies``.
    lease_policy: str | None = None
    #: Executions that may end by a lost lease or a crash.
    lease_max_attempts: int | None = None
    #: Whether running code is broken off when its lease is lost.
    lease_interrupt: bool | None = None
    #: What becomes of the message in the row: ``erase``, ``keep``, ``never``.
    lease_payload: str | None = None
    #: ``enforce`` or ``off``.
    lease_mode: str | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        call = cls.__call__
        if not getattr(call, "__lease_wrapped__", False):
            cls.__call__ = _leased(call)  # type: ignore[method-assign]

    @classmethod
    def on_bound(cls, app: Celery) -> None:
        """Check the settings and install the worker's parts.

        Raises:
            celery.exceptions.ImproperlyConfigured: A setting is wrong.
        """
        super().on_bound(app)
        if is_housekeeping(cls.name):
            return
        settings = settings_of(cls, app=app)
        if settings.mode == "off":
            return
        if cls.track_started:
            cls.tracks_started, cls.track_started = True, False
        install(app)

    @property
    def lease(self) -> RunningLease | StandInLease:
        """The lease of the execution that runs here; a stand-in outside a worker."""
        execution = _execution(self.request)
        if execution is not None and execution.lease is not None:
            return execution.lease
        return StandInLease(self.request.id or "local", self.name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the task; under a lease when a worker calls it."""
        return self._call_leased(super().__call__, args, kwargs)

    __call__.__lease_wrapped__ = True  # type: ignore[attr-defined]

    def _call_leased(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        request = self.request
        if request.called_directly or request.is_eager or _execution(request):
            return call(*args, **kwargs)
        if is_housekeeping(self.name):
            return call(*args, **kwargs)
        runtime = Runtime.of(self.app)
        settings = runtime.settings_for(self)
        if settings.mode == "off":
            return call(*args, **kwargs)
        execution = Execution(Admission(self, request, settings, runtime))
        setattr(request, _EXECUTION, execution)
        try:
            return execution.run(functools.partial(call, *args, **kwargs))
        finally:
            # The request knows its execution: knowing one another, both would keep the
            # arguments in memory until the garbage collector comes round.
            execution.forget_request()

    def push_request(self, *args: Any, **kwargs: Any) -> None:
        """Keep the request intact on the way from the lease to the body.

        Celery's own ``__call__`` pushes an empty request, which is right for a
        task called as a function, and would hide the id from a leased body.
        Celery's workers prevent that themselves (``_protected``); an embedded
        worker of a test suite does not.
        """
        request = self.request
        execution = _execution(request)
        protected = getattr(request, "_protected", 0)
        if execution is not None and not execution.entered and not protected:
            execution.entered = True
            self.request_stack.push(request)
            return
        super().push_request(*args, **kwargs)

    def retry(self, *args: Any, **kwargs: Any) -> Any:
        """Retry; the lease goes to the next message before that is published.

        Raises:
            LeaseLost: Only the owner may publish a retry.
        """
        execution = _execution(self.request)
        if execution is None or execution.lease is None:
            return super().retry(*args, **kwargs)
        execution.retrying = True
        try:
            return super().retry(*args, **kwargs)
        except Reject as exc:
            # Celery rejects the message when its successor cannot be published.
            reason = getattr(exc, "reason", None)
            if isinstance(reason, LeaseLost):
                raise reason from None
            raise
        finally:
            execution.retrying = False

    def on_replace(self, sig: Any) -> Any:
        """Replace the task; the lease goes to its successor before that is published.

        Raises:
            LeaseLost: Only the owner may publish a replacement.
        """
        execution = _execution(self.request)
        if execution is None or execution.lease is None:
            return super().on_replace(sig)
        heir = stand_in(execution, sig)
        # Celery counts the successor's retries from nought, however often this task was retried.
        number = hand_on(execution, cause="replaced", due_in=execution.settings.duration, retries=0)
        if heir is not None:
            headers: dict[str, Any] = {**(heir.options.get("headers") or {})}
            heir.set(headers=headers | {DISPATCH_HEADER: number})
        try:
            return super().on_replace(sig)
        except Ignore:
            replaced_by(execution, number, heir)
            raise
        except Exception as exc:
            # Not with the broker, so it is no failure of the task: a reaper sends it again.
            raise Reject(exc, requeue=False) from exc

    def add_to_chord(self, sig: Any, lazy: bool = False) -> Any:  # noqa: FBT001, FBT002 - celery's
        """Extend the chord; only the owner may.

        Raises:
            LeaseLost: This execution no longer owns the task.
        """
        self._check_owner()
        parent: Any = super()
        return parent.add_to_chord(sig, lazy)

    def update_state(
        self, task_id: str | None = None, state: str | None = None, meta: Any = None, **kwargs: Any
    ) -> None:
        """Store a state of the body's own; only the owner may.

        Raises:
            LeaseLost: This execution no longer owns the task.
        """
        if task_id in (None, self.request.id):
            self._check_owner()
        super().update_state(task_id, state, meta, **kwargs)

    def _check_owner(self) -> None:
        execution = _execution(self.request)
        if execution is not None and execution.lease is not None:
            execution.lease.check_not_lost()

    def apply_async(self, args: Any = None, kwargs: Any = None, *rest: Any, **options: Any) -> Any:
        """Send the task; a retry carries its dispatch number."""
        execution = _execution(self.request)
        if execution is None or not execution.retrying or options.get("task_id") != self.request.id:
            return super().apply_async(args, kwargs, *rest, **options)
        due_in = _seconds_until(options)
        number = hand_on(
            execution,
            cause="retry",
            due_in=due_in,
            retries=options.get("retries") or 0,
            message=execution.admission.next_message(args, kwargs, options, due_in),
        )
        options["headers"] = {**(options.get("headers") or {}), DISPATCH_HEADER: number}
        sent = super().apply_async(args, kwargs, *rest, **options)
        sent_on(execution, number, due_in)
        return sent


def _execution(request: object) -> Execution | None:
    """The execution that a request belongs to.

    Only one of our own counts: a message's headers become attributes of the request.
    """
    found = getattr(request, _EXECUTION, None)
    return found if isinstance(found, Execution) else None


def _seconds_until(options: dict[str, Any]) -> float:
    """Seconds until a message that is about to be sent is due."""
    if options.get("countdown"):
        return max(float(options["countdown"]), 0.0)
    eta = options.get("eta")
    if not isinstance(eta, datetime):
        return 0.0
    now = datetime.now(timezone.utc) if eta.tzinfo else datetime.now()  # noqa: DTZ005 - as Celery
    return max((eta - now).total_seconds(), 0.0)


def _on_told(sender: Any = None, **_: Any) -> None:
    """Celery has stored the outcome and sent what follows from it: the row may say so."""
    execution = _execution(getattr(sender, "request", None))
    if execution is not None and execution.outcome_ref is not None:
        ref, execution.outcome_ref = execution.outcome_ref, None
        ask_as_usual(execution.task.backend)
        execution.runtime.announce_later(ref, harmless=execution.harmless)


def _on_process_end(**_: Any) -> None:
    flush_all()


celery_signals.task_success.connect(_on_told, weak=False, dispatch_uid="celery_lease.told")
celery_signals.task_failure.connect(_on_told, weak=False, dispatch_uid="celery_lease.told")
for _signal in (celery_signals.worker_process_shutdown, celery_signals.worker_shutdown):
    _signal.connect(_on_process_end, weak=False, dispatch_uid="celery_lease.flush")
