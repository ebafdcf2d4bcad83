"""Parameters of every kernel: name -> dimensions (scalars have none) and dtype, in call order. dtype None, "gate", "state" and
"operand" are the spec's. Spelled out here, since ops call by position."""

from __future__ import annotations

from kda_tl.specs.kernels import KernelSpec

__all__ = ["expected_parameters"]

Parameters = dict[str, tuple[int, str | None]]

_GATES: Parameters = {
    "g": (4, None),
    "beta": (3, None),
    "g_wide": (4, "float32"),
    "beta_wide": (3, "float32"),
    "A_log": (1, "float32"),
    "dt_bias": (2, "float32"),
    "bonus": (2, "float32"),
}
_POOL: Parameters = {
    "base": (4, "state"),
    "base_low": (3, "int32"),
    "log_k": (3, None),
    "log_u": (3, "float32"),
    "log_d": (3, "float32"),
    "cursor": (3, "int32"),
    "state_indices": (1, "int32"),
    "valid": (1, "int32"),
}
_FORMS = ("gate_form", "beta_form", "has_dt_bias", "normalize", "wide_gates", "has_valid", "null_index")


def _integers(*names: str) -> Parameters:
    return dict.fromkeys(names, (0, "int32"))


_WORKSPACE: Parameters = {
    "q_decayed": (4, "operand"),
    "k_decayed": (4, "operand"),
    "k_to_end": (4, "operand"),
    "chunk_decay": (3, "float32"),
    "A_inv": (4, "operand"),
    "P": (4, "operand"),
}

_PARAMETERS: dict[str, Parameters] = {
    "chunk_wy": {
        "q": (4, None),
        "k": (4, None),
        "g": (4, "gate"),
        "beta": (3, "gate"),
        **dict.fromkeys(("A_log", "dt_bias", "bonus"), (1, "float32")),
        "cu_seqlens": (1, "int32"),
        **_WORKSPACE,
        "lower_bound": (0, "float32"),
        **_integers("gate_form", "beta_form", "normalize", "uniform"),
    },
    "chunk_scan": {
        "v": (4, None),
        "cu_seqlens": (1, "int32"),
        **_WORKSPACE,
        "o": (4, None),
        "initial_state": (4, "state"),
        "final_state": (4, "state"),
        "state_indices": (1, "int32"),
        "has_initial_state": (1, "uint8"),
        "segment_states": (5, "float32"),
        "states": (4, "float32"),
        "scale": (0, "float32"),
        **_integers(
            "num_seqs",
            "uniform",
            "load_state",
            "masked",
            "store_final_state",
            "indexed",
            "store_states",
            "null_index",
            "segments",
            "segment_chunks",
        ),
    },
    "intracard_pre_scan": {
        "v": (4, None),
        "cu_seqlens": (1, "int32"),
        **{name: _WORKSPACE[name] for name in ("k_decayed", "k_to_end", "chunk_decay", "A_inv")},
        **dict.fromkeys(("transitions", "biases"), (5, "float32")),
        **_integers("num_seqs", "uniform", "segments", "segment_chunks", "every"),
    },
    "intracard_merge": {
        **dict.fromkeys(("transitions", "biases"), (5, "float32")),
        "cu_seqlens": (1, "int32"),
        "initial_state": (4, None),
        "state_indices": (1, "int32"),
        "has_initial_state": (1, "uint8"),
        "segment_states": (5, "float32"),
        **_integers("seq_len", "num_seqs", "uniform", "load_state", "masked", "indexed", "null_index", "segment_chunks"),
    },
    "recurrent_decode": {
        **dict.fromkeys(("q", "k", "v", "g"), (4, None)),
        "g_wide": (4, "float32"),
        "beta": (3, None),
        "beta_wide": (3, "float32"),
        "A_log": (1, "float32"),
        **dict.fromkeys(("dt_bias", "bonus"), (2, "float32")),
        **dict.fromkeys(("cu_seqlens", "state_indices"), (1, "int32")),
        "starts": (1, "uint8"),
        "o": (4, None),
        **dict.fromkeys(("state_in", "state_out"), (4, "state")),
        "N": (0, "int32"),
        **dict.fromkeys(("scale", "lower_bound"), (0, "float32")),
        **_integers("flags", "gate_form", "beta_form", "null_index"),
    },
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
    "deltalog_decode_step": {
        "q": (4, None),
        "k": (4, None),
        "v": (4, None),
        **_GATES,
        **_POOL,
        "o": (4, None),
        "scale": (0, "float32"),
        "lower_bound": (0, "float32"),
        **_integers(*_FORMS, "merge_every"),
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


def expected_parameters(spec: KernelSpec) -> dict[str, tuple[int, str]]:
    """Of a kernel with that spec."""
    fields = spec.as_dict()
    own = {
        None: fields["dtype"],
        "gate": fields.get("gate_dtype"),
        "state": fields.get("state_dtype"),
        "operand": spec.operand_dtype,
    }
    variant = "_append" if fields.get("prepared") else "_step" if fields.get("one_token") else ""
    found = {
        name: (dimensions, str(own.get(dtype, dtype)))
        for name, (dimensions, dtype) in _PARAMETERS[spec.kernel + variant].items()
    }
    if spec.kernel == "chunk_wy" and fields["decay"] != "per_key":
        found["g"] = (3, found["g"][1])
    return found
