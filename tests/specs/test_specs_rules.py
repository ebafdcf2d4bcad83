from __future__ import annotations

import dataclasses

import pytest

from kda_tl.specs.rules import RULES, Rule


def test_rules_are_hashable_printable_and_distinct() -> None:
    assert len(set(RULES.values())) == len(RULES) == 7
    assert repr(RULES["gdn"]) == "Rule(decay='scalar', delta=True, read_first=False)"
    assert RULES["rwkv6"].as_dict() == {"decay": "per_key", "delta": False, "read_first": True}
    with pytest.raises(dataclasses.FrozenInstanceError):
        RULES["kda"].delta = False  # type: ignore[misc]


@pytest.mark.parametrize(
    ("error", "message", "fields"),
    [
        (ValueError, "decay must be one of none, scalar, per_key, got 'vector'", {"decay": "vector"}),
        (ValueError, "read_first=True needs delta=False", {"read_first": True}),
        (TypeError, "delta must be a bool, got 1", {"delta": 1}),
        (TypeError, "read_first must be a bool", {"delta": False, "read_first": "yes"}),
    ],
)
def test_what_is_no_rule_is_refused(error: type[Exception], message: str, fields: dict) -> None:
    with pytest.raises(error, match=message):
        Rule(**fields)
