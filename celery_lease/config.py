"""The settings of a leased task, as one validated, frozen value.

Knows the names, the defaults and the legal ranges of ``lease_*`` settings and
how the three places they come from are laid over one another: ``app.conf``,
a named policy, attributes of the task class. Knows nothing of Celery objects,
of a database or of messages; above all nothing that a message carries can
reach it (a sender never chooses a duration, a limit or a policy).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from celery.exceptions import ImproperlyConfigured

__all__ = ("Settings", "check_names")

_MODES = ("enforce", "off")
_PAYLOADS = ("erase", "keep", "never")
_DAY = 86_400.0

#: Settings that belong to the whole app: a task attribute or a policy cannot
#: change them, since one worker has one database and one reaper.
APP_ONLY = frozenset(
    {
        "url",
        "engine_options",
        "namespace",
        "schema",
        "policies",
        "reaper",
        "reaper_interval",
        "retention",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of one leased task. Durations are seconds.

    Raises:
        celery.exceptions.ImproperlyConfigured: A value is out of its legal
            range; the message names the key, the value and the range.
    """

    #: SQLAlchemy URL of the lease database.
    url: str = ""
    #: Passed to :func:`sqlalchemy.create_engine`.
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    #: Database schema that holds the tables; None is the connection's default.
    schema: str | None = None
    #: Which app and broker a row belongs to; empty: derived from both.
    namespace: str = ""
    #: L, how long one renewal lasts.
    duration: float = 90.0
    #: H, the time between two renewals.
    heartbeat_interval: float = 30.0
    #: R, renewals in a row that may fail without losing the lease.
    missed_heartbeats: int = 1
    #: J, the margin for jitter, pauses and an overloaded database.
    margin: float = 20.0
    #: Name of the policy to use.
    policy: str | None = None
    #: Named sets of the settings here.
    policies: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    #: Executions that may end by a lost lease or a crash.
    max_attempts: int = 3
    #: Whether the running code is broken off when the lease is lost.
    interrupt: bool = True
    #: Whether this worker runs a reaper.
    reaper: bool = True
    #: Time between two passes of the fleet's reapers.
    reaper_interval: float = 5.0
    #: What becomes of the message in the row: ``erase``, ``keep``, ``never``.
    payload: str = "erase"
    #: How long terminal rows are kept.
    retention: float = 7 * _DAY
    #: ``enforce`` or ``off`` (plain Celery).
    mode: str = "enforce"

    def __post_init__(self) -> None:
        _check_number("duration", self.duration, above=0)
        _check_number("heartbeat_interval", self.heartbeat_interval, above=0)
        _check_number("margin", self.margin, least=0)
        _check_number("reaper_interval", self.reaper_interval, above=0)
        _check_number("retention", self.retention, above=0)
        _check_whole("missed_heartbeats", self.missed_heartbeats, least=0)
        _check_whole("max_attempts", self.max_attempts, least=1)
        _check_choice("payload", self.payload, _PAYLOADS)
        _check_choice("mode", self.mode, _MODES)
        for key in ("interrupt", "reaper"):
            if not isinstance(getattr(self, key), bool):
                raise _illegal(key, getattr(self, key), "True or False")
        _check_mapping("engine_options", self.engine_options)

    def check_intervals(self, task_name: str) -> None:
        """Refuse a lease that its own heartbeat cannot keep: L > R × H + J must hold.

        The rule is the requirement's ("choose intervals by their safety
        margin"): the lease has to outlive the tolerated misses and still
        leave the margin. With R = 0 it has to outlive one beat at least.

        Args:
            task_name: Named in the error.

        Raises:
            celery.exceptions.ImproperlyConfigured: With the numbers and the
                smallest legal duration.
        """
        needed = max(self.missed_heartbeats, 1) * self.heartbeat_interval + self.margin
        if self.duration > needed:
            return
        smallest = math.floor(needed) + 1
        raise ImproperlyConfigured(
            f"task {task_name}: lease_duration={self.duration:g} is too short for"
            f" lease_heartbeat_interval={self.heartbeat_interval:g},"
            f" lease_missed_heartbeats={self.missed_heartbeats}, lease_margin={self.margin:g}:"
            f" it must be greater than {needed:g}"
            f" (missed heartbeats × interval + margin); the smallest whole value is {smallest}"
        )

    @classmethod
    def from_layers(
        cls, app_values: Mapping[str, Any], task_values: Mapping[str, Any], task_name: str = ""
    ) -> Settings:
        """Lay task attributes over the named policy over the app's settings.

        Args:
            app_values: ``lease_*`` settings of the app, without the prefix.
            task_values: ``lease_*`` attributes of the task, without the prefix.
            task_name: Named in errors.

        Returns:
            The validated settings.

        Raises:
            celery.exceptions.ImproperlyConfigured: An unknown key or policy,
                an illegal value, or intervals that do not fit.
        """
        policies = app_values.get("policies") or {}
        _check_mapping("policies", policies)
        for key in task_values.keys() & APP_ONLY:
            raise ImproperlyConfigured(
                f"task {task_name}: lease_{key} belongs to the whole app, set it in app.conf"
            )
        name = task_values.get("policy", app_values.get("policy"))
        policy = _policy(name, policies, task_name)
        merged = {**app_values, **policy, **task_values}
        check_names(merged)
        settings = cls(**{key: value for key, value in merged.items() if value is not None})
        settings.check_intervals(task_name)
        return settings


#: Every legal key, without its ``lease_`` prefix.
NAMES = frozenset(entry.name for entry in fields(Settings))


def check_names(keys: Mapping[str, Any], *, where: str = "settings") -> None:
    """Refuse keys that are not settings, so that a typing error never passes silently.

    Raises:
        celery.exceptions.ImproperlyConfigured: Names the key and the closest legal ones.
    """
    for key in keys:
        if key not in NAMES:
            close = difflib.get_close_matches(key, NAMES, n=1)
            hint = f"did you mean lease_{close[0]}?" if close else "legal names: " + _all_names()
            raise ImproperlyConfigured(f"unknown setting lease_{key} in {where}: {hint}")


def _all_names() -> str:
    return ", ".join(f"lease_{name}" for name in sorted(NAMES))


def _policy(
    name: object, policies: Mapping[str, Mapping[str, Any]], task_name: str
) -> dict[str, Any]:
    for known, values in policies.items():
        _check_mapping(f"policies[{known!r}]", values)
        bare = {str(key).removeprefix("lease_") for key in values}
        check_names(dict.fromkeys(bare), where=f"lease_policies[{known!r}]")
        for key in bare & (APP_ONLY | {"policy"}):
            raise ImproperlyConfigured(
                f"lease_policies[{known!r}]: lease_{key} belongs to the whole app, set it in app.conf"
            )
    if name is None:
        return {}
    if name not in policies:
        legal = ", ".join(repr(key) for key in policies) or "none, for lease_policies is empty"
        raise ImproperlyConfigured(
            f"task {task_name}: lease_policy={name!r} is not legal: expected one of: {legal}"
        )
    return {str(key).removeprefix("lease_"): value for key, value in policies[str(name)].items()}


def _illegal(key: str, value: object, legal: str) -> ImproperlyConfigured:
    return ImproperlyConfigured(f"lease_{key}={value!r} is not legal: expected {legal}")


def _check_number(
    key: str, value: object, *, above: float | None = None, least: float | None = None
) -> None:
    legal = f"a number > {above:g}" if above is not None else f"a number >= {least:g}"
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise _illegal(key, value, legal + " (seconds)")
    if (above is not None and value <= above) or (least is not None and value < least):
        raise _illegal(key, value, legal + " (seconds)")


def _check_whole(key: str, value: object, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise _illegal(key, value, f"a whole number >= {least}")


def _check_choice(key: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise _illegal(key, value, "one of: " + ", ".join(repr(choice) for choice in choices))


def _check_mapping(key: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise _illegal(key, value, "a mapping")
