"""On-policy distillation over the most likely tokens of a teacher: the divergence of two next-token distributions.

The teacher gives the K most likely tokens at each position of a response with their log-probs; the policy's training
pass gives its own log-probs of the same tokens, with gradient. All other tokens together are one more outcome.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from roll.algorithms.lazy_torch import Tensor, torch
from roll.base.errors import Finding, error
from roll.base.schema import Condition, needs, option

TEACHER_TOP_IDS, TEACHER_TOP_LOG_PROBS = "teacher_top_ids", "teacher_top_log_probs"
"""Tensors [B, T, K] of a batch: the teacher's most likely tokens (int32, -1 for none), and their log-probs."""

POLICY_TOP_LOG_PROBS = "policy_top_log_probs"
"""Tensor [b, T, K] of a micro-batch, added by the training pass: the policy's log-probs of these tokens."""

REST_FLOOR = 1e-6
"""Smallest probability of the other tokens: below it, 1 minus the sum of the others is rounding of fp32."""


TEACHER = Condition(
    lambda config, _: config.uses_teacher,
    "there is no teacher: use_opd is false and adv_estimator is not opd",
    ("use_opd", "adv_estimator"),
)


def jsd_beta(value: Any) -> Any:
    """The weight, unchanged.

    Raises:
        ValueError: it is 0 or 1, where the divergence is 0 whatever the policy does.
    """
    limits = {0.0: "forward", 1.0: "reverse"}
    limit = None if isinstance(value, bool) else limits.get(value)
    if limit is not None:
        raise ValueError(
            f"at {value:g} the divergence is always 0; use opd_divergence: {limit}, which is its limit there"
        )
    return value


Divergence = Literal["reverse", "forward", "jsd"]
"""A divergence of the policy from a teacher."""


@dataclass
class DistillationOptions:
    """The keys of a teacher."""

    opd_kl_coef: float = option(
        1.0,
        "Weight of the teacher.",
        gt=0,
        usual=(1e-6, 100.0),
        only_for=TEACHER,
    )
    opd_top_k: int | None = option(
        None,
        "The teacher's most likely tokens at each position: opd_kl_coef x the divergence over them, and one outcome "
        "for all others, is a term of the loss instead of the advantage. At least the vocabulary: over all tokens. "
        "null: the sampled token alone.",
        ge=1,
        only_for=TEACHER,
    )
    opd_divergence: Divergence = option(
        "reverse",
        "Divergence of opd_top_k: KL of the policy from the teacher (reverse), KL of the teacher from the policy "
        "(forward), or the generalised Jensen-Shannon divergence of GKD (jsd).",
        only_for=needs("opd_top_k", "opd_top_k is null, so only sampled tokens are compared", lambda k: k is not None),
    )
    opd_jsd_beta: float = option(
        0.5,
        "Weight of the teacher in the mixture that jsd compares both with, above 0 and below 1: small ones learn as "
        "forward does, large ones as reverse.",
        gt=0,
        lt=1,
        usual=(0.001, 0.999),
        parse=jsd_beta,
        only_for=needs("opd_divergence", "opd_divergence is not jsd", lambda divergence: divergence == "jsd"),
    )


def check_teacher(config: Any) -> Iterator[Finding]:
    """The teacher is another model than the policy, and serves no KL term."""
    teacher, policy = (role.model_args.model_name_or_path for role in (config.reference, config.actor_train))
    asked = "use_opd: true" if config.use_opd else f"adv_estimator {config.adv_estimator}"
    if teacher == policy:
        yield error(
            "reference.model_args.model_name_or_path",
            f"{teacher} is the model that is trained, but with {asked} the reference is the teacher; name the teacher",
        )
    for name in ("use_kl_loss", "add_token_level_kl"):
        if getattr(config, name):
            yield error(
                name,
                f"true needs a reference of its own, but with {asked} the reference is the teacher; set it to false",
            )


def top_k_divergence(policy: Tensor, teacher: Tensor, known: Tensor, divergence: str, beta: float = 0.5) -> Tensor:
    """Divergence at each position between policy pi and teacher q over K tokens and the rest.

    With the rest r = max(1 - sum_k p_k, REST_FLOOR) of either distribution, `reverse` is

        KL(pi || q) = sum_k pi_k (log pi_k - log q_k) + r_pi (log r_pi - log r_q)

    and `forward` is KL(q || pi), the same with both exchanged. With the mixture m = beta q + (1 - beta) pi, `jsd` is

        beta KL(q || m) + (1 - beta) KL(pi || m)

    It is at most -beta log beta - (1 - beta) log(1 - beta); divided by beta it tends to `forward` as beta falls to 0,
    and divided by 1 - beta to `reverse` as beta rises to 1. Merging tokens to one outcome never increases one of these
    divergences, so it is a lower bound of that over all tokens, and equal to it if K tokens are all. Source: the
    divergences of GKD (arXiv 2306.13649, eq. 1 for `jsd`) with one outcome for the tokens that the teacher leaves out.

    Args:
        policy: log pi [..., K] of the tokens, with gradient.
        teacher: log q [..., K], without gradient.
        known: bool [..., K], false where there is no token; its values are ignored.
        divergence: `reverse`, `forward` or `jsd`.
        beta: of `jsd`, above 0 and below 1.

    Returns:
        [...], with gradient in `policy`.
    """
    policy, teacher = (x.masked_fill(~known, 0.0) for x in (policy, teacher.to(policy.dtype)))
    p, q = (torch.where(known, x.exp(), 0.0) for x in (policy, teacher))
    rest_p, rest_q = ((1 - x.sum(-1)).clamp(min=REST_FLOOR) for x in (p, q))
    if divergence == "jsd":
        p, q = torch.cat([p, rest_p[..., None]], -1), torch.cat([q, rest_q[..., None]], -1)
        apart = torch.cat([policy - teacher, (rest_p.log() - rest_q.log())[..., None]], -1)
        # log q - log m and log p - log m from log p - log q, since both are small where the logs themselves are large
        to_teacher = -torch.logaddexp(apart.new_tensor(math.log(beta)), math.log1p(-beta) + apart)
        to_policy = -torch.logaddexp(apart.new_tensor(math.log1p(-beta)), math.log(beta) - apart)
        return (beta * q * to_teacher + (1 - beta) * p * to_policy).sum(-1)
    if divergence == "forward":
        return (q * (teacher - policy)).sum(-1) + rest_q * (rest_q.log() - rest_p.log())
    return (p * (policy - teacher)).sum(-1) + rest_p * (rest_p.log() - rest_q.log())


def teacher_divergence(micro: Mapping[str, Tensor], options: DistillationOptions) -> tuple[Tensor, Tensor]:
    """The divergence of `opd_divergence` and the probability of the teacher's tokens at each position, both [b, T]."""
    teacher, known = micro[TEACHER_TOP_LOG_PROBS], micro[TEACHER_TOP_IDS] >= 0
    policy, beta = micro[POLICY_TOP_LOG_PROBS], options.opd_jsd_beta
    mass = torch.where(known, teacher.exp(), 0.0).sum(-1)
    return top_k_divergence(policy, teacher, known, options.opd_divergence, beta), mass
