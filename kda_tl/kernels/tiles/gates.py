"""Gate activations in float32, for every target: what is rounded to a narrow type here, a state keeps for good.

Forms are run-time integers (`kda_tl.specs.gates`), so that one artifact serves all of them; the branch is the same for the
whole launch. Scalar parameters that are handed on here must be named as here (gate_form, beta_form, lower_bound): a macro
renames them, and two of one name would be one to the loader. Infinite and large arguments give the limit; NaN stays NaN.
"""

import tilelang.language as T

from kda_tl.specs.gates import BetaForm, GateForm

LARGEST_EXPONENT = 88.0  # exp of it is finite in float32


@T.macro
def sigmoid(x):
    """1 / (1 + e^-x); 0 and 1 at -inf and inf."""
    return T.float32(1.0) / (T.float32(1.0) + T.exp(-x))


@T.macro
def softplus(x):
    """log(1 + e^x), to a few units in the last place of the result: max(x, 0) + log1p(e^-|x|), with no linear branch."""
    positive = T.if_then_else(x > T.float32(0.0), x, T.float32(0.0))
    return positive + T.log1p(T.exp(T.if_then_else(x > T.float32(0.0), -x, x)))


@T.macro
def gate_rate(A_log):
    """exp(A_log), once per head. Kept finite: an infinite rate times x = 0 would be NaN, where the gate has a limit."""
    return T.exp(T.if_then_else(A_log > T.float32(LARGEST_EXPONENT), T.float32(LARGEST_EXPONENT), A_log))


@T.macro
def log_decay(gate_form, x, rate, lower_bound):
    """Natural-log decay from x = g + dt_bias (g itself for IDENTITY); gate_form is a GateForm, rate is `gate_rate(A_log)`.

    rate is read by SOFTPLUS and BOUNDED only, lower_bound (< 0) by the bounded forms only.
    """
    value = T.alloc_var("float32", init=0.0)
    value = x
    if gate_form == int(GateForm.SOFTPLUS):
        value = -rate * softplus(x)
    if gate_form == int(GateForm.BOUNDED):
        value = lower_bound * sigmoid(rate * x)
    if gate_form == int(GateForm.BOUNDED_UNSCALED):
        value = lower_bound * sigmoid(x)
    return value


@T.macro
def write_strength(beta_form, beta):
    """beta, sigmoid(beta) or 2 sigmoid(beta), in float32; beta_form is a BetaForm."""
    value = T.alloc_var("float32", init=0.0)
    value = beta
    if beta_form != int(BetaForm.IDENTITY):
        value = sigmoid(beta) * T.if_then_else(beta_form == int(BetaForm.TWICE_SIGMOID), T.float32(2.0), T.float32(1.0))
    return value


@T.macro
def inverse_norm(sum_of_squares):
    """1 / sqrt(sum x^2 + 1e-6), the factor of the l2 norm of q and k."""
    return T.float32(1.0) / T.sqrt(sum_of_squares + T.float32(1e-6))
