"""Names a configuration may choose from, importable without torch; the registries that hold them agree with these."""

from __future__ import annotations

TURN_ESTIMATORS = ("gigpo", "step_reinforce", "agentic_reinforce")
"""Values of `adv_estimator` that look into the turns of a trajectory."""

ADV_ESTIMATORS = (
    "grpo",
    "reinforce",
    "rloo",
    "lite_ppo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    *TURN_ESTIMATORS,
)
"""Values of `adv_estimator`."""

GROUP_ESTIMATORS = ("grpo", "rloo", "lite_ppo", "reinforce_plus_plus_baseline")
"""Those that compare a response with the others to its prompt and give all its tokens one advantage."""

PG_VARIANTS = ("ppo", "vanilla", "tis", "topr", "cispo", "kimi15", "gspo", "decoupled_ppo")
"""Values of `pg_variant`."""

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Values of `architectures` in a model's config.json that can be trained."""

TEMPLATES = ("native", "none", "chatml", "qwen2_5", "qwen3", "llama3")
"""Values of `data_args.template`; `roll.datasets.templates` holds them."""
