"""Parameters of DeltaLog's programs: name -> dimensions and dtype, in call order; dtype None or "state_dtype": the spec's."""

from __future__ import annotations

_GATES: dict[str, tuple[int, str | None]] = {
    "g": (4, None),
    "beta": (3, None),
    "g_wide": (4, "float32"),
    "beta_wide": (3, "float32"),
    "A_log": (1, "float32"),
    "dt_bias": (2, "float32"),
    "bonus": (2, "float32"),
}
_POOL: dict[str, tuple[int, str | None]] = {
    "base": (4, "state_dtype"),
    "log_k": (4, None),
    "log_u": (4, "float32"),
    "log_d": (4, "float32"),
    "cursor": (4, "int32"),
    "state_indices": (1, "int32"),
    "valid": (1, "int32"),
}
_FORMS = ("gate_form", "beta_form", "has_dt_bias", "normalize", "wide_gates", "has_valid", "null_index")


def _integers(*names: str) -> dict[str, tuple[int, str | None]]:
    return dict.fromkeys(names, (0, "int32"))


DELTALOG_PARAMETERS: dict[str, dict[str, tuple[int, str | None]]] = {
    "deltalog_decode": {
        "q": (4, None),
        "k": (4, None),
        "v": (4, None),
        **_GATES,
        **_POOL,
        "o": (4, None),
        "scale": (0, "float32"),
        "lower_bound": (0, "float32"),
        **_integers(*_FORMS, "tokens", "merge_every", "may_fold", "reserve"),
    },
    "deltalog_prep": {
        "q": (4, None),
        "k": (4, None),
        **_GATES,
        **{name: _POOL[name] for name in ("log_k", "log_d", "cursor", "state_indices", "valid")},
        "prepared": (3, "float32"),
        "lower_bound": (0, "float32"),
        **_integers(*_FORMS),
    },
    "deltalog_decode_append": {
        "v": (4, None),
        "prepared": (3, "float32"),
        **_POOL,
        "o": (4, None),
        "scale": (0, "float32"),
        **_integers("has_valid", "null_index", "merge_every"),
    },
}
