"""Closed-form answers on small action sets, against which trainers and losses are tested (KLOPT, da.kl_optimum,
da.psipo).

Everything is exact over an enumerated set of actions; arrays are float64 numpy.
"""

from __future__ import annotations

import numpy as np


def _f64(x):
    return np.asarray(x.detach().cpu() if hasattr(x, "detach") else x, dtype=np.float64)


def kl_optimum(ref, rewards, beta: float) -> dict:
    """pi* ~ ref exp(r / beta) maximises E[r] - beta KL(pi||ref): Z, pi, kl, expected_reward and the value beta log
    Z.
    """
    ref, r = _f64(ref), _f64(rewards)
    weights = ref * np.exp(r / beta)
    Z = weights.sum()
    pi = weights / Z
    return {
        "Z": Z,
        "pi": pi,
        "objective": beta * np.log(Z),
        "kl": float((pi * np.log(pi / ref)).sum()),
        "expected_reward": float(pi @ r),
    }


def psi_po_optimum(ref, preference, tau: float, psi: str = "identity", mu=None) -> dict:
    """pi*(y) ~ ref(y) exp(E_{y'~mu} Psi(p(y > y')) / tau); preference[i][j] = P(i > j), mu uniform by default
    (da.psipo).
    """
    ref, P = _f64(ref), _f64(preference)
    mu = np.full(len(ref), 1 / len(ref)) if mu is None else _f64(mu)
    if psi == "logit":
        if ((P <= 0) | (P >= 1)).any():
            raise ValueError("psi=logit is infinite at preferences of 0 or 1; clip them or write psi='identity'")
        P = np.log(P / (1 - P))
    mean = P @ mu
    weights = ref * np.exp(mean / tau)
    return {"psi_mean": mean, "pi": weights / weights.sum()}


def prospect_value(x, alpha: float = 0.88, beta: float = 0.88, loss_aversion: float = 2.25):
    """x^a for gains, -lambda (-x)^b for losses (da.halo, Tversky and Kahneman 1992)."""
    x = _f64(x)
    return np.where(x >= 0, np.abs(x) ** alpha, -loss_aversion * np.abs(x) ** beta)


def geometric_mixture(logits, other_logits, coef: float):
    """softmax((1 - coef) log pi + coef log other) over the last axis; coef weights the other policy (da.ipo_md)."""
    z = (1 - coef) * _log_softmax(_f64(logits)) + coef * _log_softmax(_f64(other_logits))
    return np.exp(_log_softmax(z))


def _log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def softmax_policy_gradient(probs, action_values):
    """Exact gradient of sum_a pi(a) q(a) wrt the logits of a softmax: pi (q - sum pi q), last axis (PG)."""
    p, q = _f64(probs), _f64(action_values)
    return p * (q - (p * q).sum(-1, keepdims=True))


def natural_step(logits, action_values, max_kl: float, damping: float = 0.0) -> dict:
    """TRPO step of a softmax policy: gradient, Fisher matrix, direction x and the full step (NPG, TRPO).

    x solves (F + damping I) x = g (pseudo-inverse without damping); step = sqrt(2 max_kl / x'(F + damping I)x) x.
    """
    p = np.exp(_log_softmax(_f64(logits)))
    g = softmax_policy_gradient(p, action_values)
    F = np.diag(p) - np.outer(p, p)
    H = F + damping * np.eye(len(p))
    x = np.linalg.pinv(H, rcond=1e-10) @ g
    curvature = float(x @ H @ x)
    return {"grad": g, "fisher": F, "x": x, "step": np.sqrt(2 * max_kl / curvature) * x if curvature > 0 else 0 * x}


def nash_md_step(policy, ref, preference, tau: float, eta: float):
    """(mixture, next policy) of tabular Nash-MD: mixture ~ pi^(1 - eta tau) ref^(eta tau), next ~ mixture exp(eta P(y >
    mixture)) (NASH).
    """
    mixture = geometric_mixture(np.log(_f64(policy)), np.log(_f64(ref)), eta * tau)
    weights = mixture * np.exp(eta * (_f64(preference) @ mixture))
    return mixture, weights / weights.sum()


def nash_equilibrium(ref, preference, tau: float, damping: float = 0.1, iterations: int = 20_000):
    """Fixed point pi ~ ref exp(P(y > pi) / tau) of the regularised preference game (NASH)."""
    ref, P = _f64(ref), _f64(preference)
    pi = ref.copy()
    for _ in range(iterations):
        target = ref * np.exp(P @ pi / tau)
        step = target / target.sum() - pi
        pi = pi + damping * step
        if np.abs(step).max() < 1e-14:
            break
    return pi
