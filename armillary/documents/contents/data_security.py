"""Data security and compliance: where data is, who can reach it, and what is still to decide, from the recipe."""

from __future__ import annotations

from armillary.documents.blocks import Bullets, Cell, Section, Table
from armillary.documents.facts import PlanFacts
from armillary.documents.figures import Figures
from armillary.documents.values import clean

CLASSES = {
    "public": "Public data: no restriction on where it is stored.",
    "internal": "Internal data: access by project members only.",
    "personal": "Personal data: purpose, legal basis, retention and deletion must be documented before training; a "
    "model can reproduce what it was trained on.",
    "regulated": "Regulated data: storage and processing only in approved places, with audit logs and a named owner.",
}
EXTERNAL = ("wandb",)
"""trackers that send gauges to a service outside"""


def security_section(facts: PlanFacts, figures: Figures) -> Section:
    options = facts.options
    lines = [CLASSES[options.data_class]]
    lines.append(
        f"Data stays in: {clean(options.region)}." if options.region else "No region is fixed (report.region)."
    )
    if options.compliance:
        lines.append(f"Regimes that apply: {clean(', '.join(options.compliance))}.")
    elif options.data_class in ("personal", "regulated"):
        lines.append("No compliance regime is named (report.compliance): legal has to name it.")
    rows = [*_training_controls(facts, figures), *_serving_controls(facts)]
    columns = ("asset", "in this plan", "to decide")
    table = Table(caption="Data security", columns=columns, rows=rows)
    title = "Data security and compliance"
    return Section(key="security", title=title, blocks=[Bullets(texts=lines), table])


def _training_controls(facts: PlanFacts, figures: Figures) -> list[list[Cell]]:
    if facts.training is None:
        return []
    data, job = facts.recipe.data, facts.recipe.train
    source = clean(data.path or ", ".join(data.blend) or data.source)
    store = clean(job.checkpoint_url) or "the run's folder only"
    outside = [name for name in job.track if name in EXTERNAL]
    return [
        ["training data", f"{figures.text('dataset_bytes')} from {source}", "licence, consent, encryption at rest"],
        [
            "checkpoints",
            f"{figures.text('checkpoint_kept_bytes')} in {store}; they hold what the model has learnt",
            "encryption at rest, who may read and delete them",
        ],
        [
            "metrics",
            f"sent outside to {', '.join(outside)}" if outside else "stay in the run's folder",
            "whether sample names may leave" if outside else "–",
        ],
        [
            "checksums",
            "shards are verified when first read" if data.verify else "verification is off (data.verify)",
            "–",
        ],
    ]


def _serving_controls(facts: PlanFacts) -> list[list[Cell]]:
    if facts.serving is None:
        return []
    serve = facts.recipe.serve
    keys = "API keys are required" if serve.api_key_file else "no API key is required (serve.api_key_file)"
    prefix = (
        "the prefix cache is on: prompts with the same prefix share KV blocks"
        if serve.prefix_cache
        else "no prefix cache"
    )
    traces = f"traces go to {clean(serve.otlp)}" if serve.otlp else "no traces leave the server"
    return [
        ["endpoint", keys, "TLS and access at the gateway" if serve.api_key_file else "API keys, TLS, access"],
        ["prompts and completions", f"in memory; {traces}", "retention, logging of prompts"],
        ["tenants", prefix, "whether tenants may share a server" if serve.prefix_cache else "–"],
    ]
