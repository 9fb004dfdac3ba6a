"""The verbs of the command line: one table, from which help, completion and the lazy loading are made.

A verb's module is imported only when the verb is run, so that `armillary --help` stays quick.
"""

from typing import NamedTuple


class Verb(NamedTuple):
    """One row of the table: `target` is module:attribute of the click command, `ring` a key of RINGS."""

    name: str
    target: str
    ring: str
    help: str


RINGS = {
    "know": "Know",
    "plan": "Plan",
    "inner": "Inner loop (one device)",
    "train": "Training loop (many devices)",
    "serve": "Product loop (serving)",
    "all": "All loops",
}

_ROWS = (
    Verb("models", "armillary.cli.models:models", "know", "Models of the catalogue; all facts about one."),
    Verb("hardware", "armillary.cli.hardware:hardware", "know", "Chips, nodes, links, prices; several side by side."),
    Verb("runs", "armillary.cli.runs:runs", "know", "Runs of this home: state, step, loss."),
    Verb("doctor", "armillary.cli.doctor:doctor", "know", "What this machine has, what will work, what is missing."),
    Verb("plan", "armillary.cli.plan.plan:plan", "plan", "Predict memory, time, cost, layout; search, explain, judge."),
    Verb(
        "report", "armillary.cli.report:report", "plan", "Write a plan as Word, Excel, PDF, PowerPoint, HTML, Markdown."
    ),
    Verb("simulate", "armillary.cli.simulate.simulate:simulate", "plan", "A service, or training, on a virtual clock."),
    Verb("import", "armillary.cli.import_recipe:import_", "plan", "Make a recipe of another trainer's configuration."),
    Verb("bench", "armillary.cli.bench.bench:bench", "inner", "Measure what this machine can reach, and keep it."),
    Verb(
        "profile",
        "armillary.cli.profile.profile:profile",
        "inner",
        "Where the time of a step goes: recipe, script, trace.",
    ),
    Verb("data", "armillary.cli.data:data", "train", "Prepare text as token shards."),
    Verb("train", "armillary.cli.train.train:train", "train", "Train the model of a recipe."),
    Verb("launch", "armillary.cli.launch.launch:launch", "train", "Start training on nodes: ssh, Slurm; jobs, logs."),
    Verb(
        "checkpoints",
        "armillary.cli.checkpoints:checkpoints",
        "train",
        "Checkpoints of a run: list, verify, prune, export, compare.",
    ),
    Verb("canary", "armillary.cli.train.canary:canary", "train", "Compare a short run with golden values."),
    Verb("parity", "armillary.cli.train.parity:parity", "train", "Compare parallel strategies with one process."),
    Verb("generate", "armillary.cli.generate:generate", "serve", "Generate text from a model."),
    Verb("serve", "armillary.cli.serve:serve", "serve", "Serve a model to OpenAI's clients over HTTP."),
    Verb("convert", "armillary.cli.convert:convert", "serve", "Rewrite a model as a Hugging Face folder, pt2 or ONNX."),
    Verb("quantize", "armillary.cli.quantize:quantize", "serve", "Write a model in fewer bits; say what it costs."),
    Verb("eval", "armillary.cli.evaluate:eval_", "serve", "Perplexity, tasks, and whether a model is worse."),
    Verb("registry", "armillary.cli.registry:registry", "serve", "Versions of models, and aliases that point at them."),
    Verb("gateway", "armillary.cli.gateway:gateway", "serve", "Keys, limits and routing in front of servers."),
    Verb("up", "armillary.cli.up:up", "serve", "A whole service: registry, replicas, gateway, autoscaler."),
    Verb("rollout", "armillary.cli.rollout:rollout", "serve", "Another release for a service, by a canary first."),
    Verb("load", "armillary.cli.load:load", "serve", "Test a server under load: latencies, goodput, highest rate."),
    Verb("diagnose", "armillary.cli.diagnose:diagnose", "all", "Name the loop that limits; price what would help."),
    Verb("web", "armillary.cli.web:web", "all", "Plans, catalogue, runs, servers and diagnoses in the browser."),
    Verb("demo", "armillary.cli.demo.demo:demo", "all", "Run the complete cycle, small, on this machine."),
    Verb("completion", "armillary.cli.completion:completion", "all", "Print the completion script of your shell."),
)
VERBS = {verb.name: verb for verb in _ROWS}
