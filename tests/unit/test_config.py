"""Settings: legal ranges, layers, and errors that name key, value and range."""

from __future__ import annotations

import pytest
from celery.exceptions import ImproperlyConfigured

from celery_lease.config import Settings


def layers(app: dict, task: dict | None = None) -> Settings:
    return Settings.from_layers(app, task or {}, "shop.export")


def test_defaults_are_those_of_the_requirement() -> None:
    """Without any setting a lease lasts 90 s, beats every 30 s, and forgives one miss."""
    settings = layers({})
    assert (90.0, 30.0, 1, 20.0) == (
        settings.duration,
        settings.heartbeat_interval,
        settings.missed_heartbeats,
        settings.margin,
    )


def test_a_lease_its_heartbeat_cannot_keep_is_refused_with_the_numbers() -> None:
    """L > R × H + J: the error names the task, all four numbers and the smallest legal value."""
    with pytest.raises(ImproperlyConfigured) as caught:
        layers({"duration": 50})
    for part in ("shop.export", "=50 ", "=30", "=1,", "=20", "greater than 50", "is 51"):
        assert part in str(caught.value)


def test_the_smallest_legal_duration_is_legal() -> None:
    """What the error of a short lease recommends is accepted."""
    assert layers({"duration": 51}).duration == 51


@pytest.mark.parametrize(
    ("key", "value", "legal"),
    [
        ("duration", 0, "a number > 0"),
        ("duration", "90", "a number > 0"),
        ("duration", float("nan"), "a number > 0"),
        ("heartbeat_interval", -1, "a number > 0"),
        ("margin", -0.1, "a number >= 0"),
        ("reaper_interval", 0, "a number > 0"),
        ("retention", float("inf"), "a number > 0"),
        ("missed_heartbeats", 1.5, "a whole number >= 0"),
        ("missed_heartbeats", True, "a whole number >= 0"),
        ("max_attempts", 0, "a whole number >= 1"),
        ("payload", "drop", "'erase', 'keep', 'never'"),
        ("mode", "on", "'enforce', 'off'"),
        ("interrupt", 1, "True or False"),
        ("engine_options", [], "a mapping"),
        ("policies", 3, "a mapping"),
    ],
)
def test_an_illegal_value_is_named_with_its_legal_range(
    key: str, value: object, legal: str
) -> None:
    """The error of a bad value names the setting as the user wrote it, the value and the range."""
    with pytest.raises(ImproperlyConfigured) as caught:
        layers({key: value})
    assert f"lease_{key}=" in str(caught.value)
    assert repr(value) in str(caught.value)
    assert legal in str(caught.value)


def test_a_misspelt_setting_is_refused_with_the_right_name() -> None:
    """A typing error in a setting's name never passes silently."""
    with pytest.raises(ImproperlyConfigured, match="did you mean lease_heartbeat_interval"):
        layers({"heartbeat_intervall": 5})


def test_a_task_wins_over_its_policy_and_a_policy_over_the_app() -> None:
    """Attributes of the task lie over the named policy, and that over the app's settings."""
    app = {
        "max_attempts": 9,
        "margin": 5,
        "policies": {"tool": {"lease_margin": 2, "duration": 60}},
    }
    settings = layers(app, {"policy": "tool", "duration": 70})
    assert (70, 2, 9) == (settings.duration, settings.margin, settings.max_attempts)


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    """The error of an unknown policy lists those that exist."""
    with pytest.raises(ImproperlyConfigured, match=r"lease_policy='toll'.*'tool'"):
        layers({"policies": {"tool": {}}}, {"policy": "toll"})


@pytest.mark.parametrize("key", ["url", "reaper_interval", "namespace", "retention"])
def test_what_belongs_to_the_app_cannot_be_set_elsewhere(key: str) -> None:
    """One worker has one database and one reaper: neither a task nor a policy changes them."""
    with pytest.raises(ImproperlyConfigured, match=f"lease_{key} belongs to the whole app"):
        layers({}, {key: "x"})
    with pytest.raises(ImproperlyConfigured, match=f"lease_{key} belongs to the whole app"):
        layers({"policies": {"tool": {key: "x"}}})


def test_an_unused_policy_is_checked_too() -> None:
    """A misspelt key in a policy that no task uses yet is found at once."""
    with pytest.raises(ImproperlyConfigured, match="lease_policies"):
        layers({"policies": {"tool": {"margins": 2}}})
