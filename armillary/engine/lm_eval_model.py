"""The engine as a model of lm-eval (github.com/EleutherAI/lm-evaluation-harness): likelihoods and generations of its
tasks, batched as a server would batch them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from armillary.engine.engine import Completion
from armillary.engine.llm import LLM
from armillary.engine.request.sampling_params import SamplingParams
from armillary.errors import BadInput, MissingPart
from armillary.model.text.tokenizer import Tokenizer

_MOST_GENERATED = 256  # tokens, where a task names no limit (as lm-eval's own models have it)


def run_tasks(llm: LLM, tasks: Sequence[str], *, limit: int | None = None) -> dict[str, Any]:
    """Task -> metric -> value. A task is a name that lm-eval knows, or a task file (.yaml)."""
    lm_eval = need_lm_eval()
    from lm_eval.tasks import TaskManager

    files = [Path(task) for task in tasks if task.endswith((".yaml", ".yml"))]
    manager = TaskManager(include_path=sorted({str(file.resolve().parent) for file in files}) or None)
    names = [task for task in tasks if Path(task) not in files] + [_task_name(file) for file in files]
    for name in names:
        if not manager.match_tasks([name]):
            raise BadInput(f"lm-eval knows no task '{name}'; lm-eval ls tasks lists them")
    results = lm_eval.simple_evaluate(model=engine_model(llm), tasks=names, task_manager=manager, limit=limit)
    return {name: _metrics(values) for name, values in results["results"].items()}


def _task_name(file: Path) -> str:
    if not file.is_file():
        raise BadInput(f"no task file {file}; check the name")
    results = re.search(r"^task:\s*(\S+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    if results is None:
        raise BadInput(f"{file} names no task; give a file with a line like task: my_task")
    return results.group(1)


def need_lm_eval() -> Any:
    try:
        import lm_eval
    except ModuleNotFoundError:
        raise MissingPart("tasks need lm-eval: pip install lm-eval") from None
    return lm_eval


def _metrics(values: dict[str, Any]) -> dict[str, float]:
    """acc, acc_stderr and so on: lm-eval adds the name of a filter behind a comma."""
    numbers = {name: value for name, value in values.items() if isinstance(value, float | int) and "," in name}
    return {name.removesuffix(",none"): float(value) for name, value in numbers.items()}


def engine_model(llm: LLM) -> Any:
    """An `lm_eval.api.model.LM` over the engine."""
    from lm_eval.api.model import TemplateLM

    if llm.tokenizer is None:
        raise BadInput("this model has no tokenizer.json, so tasks cannot be put to it; give a model that has one")
    tokenizer: Tokenizer = llm.tokenizer
    longest = llm.engine.scheduler.settings.max_model_len

    class EngineModel(TemplateLM):  # type: ignore[misc]
        tokenizer_name = "armillary"

        @property
        def eot_token_id(self) -> int:
            assert tokenizer.eos_id is not None
            return tokenizer.eos_id

        @property
        def prefix_token_id(self) -> int:
            return self.eot_token_id if tokenizer.bos_id is None else tokenizer.bos_id

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            """With the tokens that the tokenizer adds by itself, such as BOS, as lm-eval's transformers backend has it:
            without BOS some models are far worse."""
            return tokenizer.encode(string, special=add_special_tokens is not False)

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            return tokenizer.chat(chat_history, add_generation_prompt=add_generation_prompt)

        def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
            cases = [(context, continuation) for _, context, continuation in requests]
            return likelihoods(llm, cases, longest)

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
            return [
                sum(value for value, _ in likelihoods(llm, rolling_pairs(ids, self.prefix_token_id, longest), longest))
                for ids in (tokenizer.encode(request.args[0], special=False) for request in requests)
            ]

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            return generations(llm, [request.args for request in requests], tokenizer.encode, longest)

    return EngineModel()


def likelihoods(llm: LLM, cases: Sequence[tuple[list[int], list[int]]], longest: int) -> list[tuple[float, bool]]:
    """(log-probability of the continuation, whether it is what greedy decoding gives) of each context and continuation;
    contexts that are too long lose their beginning."""
    prompts = [(context + continuation)[-(longest - 1) :] for context, continuation in cases]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    results = []
    for (_, continuation), completion in zip(cases, llm.generate(prompts, params), strict=True):
        _check(completion)
        scored = completion.prompt_logprobs[-len(continuation) :]
        if len(scored) < len(continuation):
            raise BadInput(f"a continuation of {len(continuation)} tokens is longer than max_model_len {longest}")
        greedy = all(each.top[0][0] == each.token for each in scored)
        results.append((sum(each.value for each in scored), greedy))
    return results


def rolling_pairs(ids: list[int], prefix: int, longest: int) -> list[tuple[list[int], list[int]]]:
    """A text in windows, each token predicted once, those after the first window with the end of the one before."""
    size = longest - 2
    cases = [([prefix], ids[:size])] if ids else []
    for begin in range(size, len(ids), size):
        part = ids[begin : begin + size]
        cases.append((ids[begin - (longest - 1 - len(part)) : begin], part))
    return cases


def generations(
    llm: LLM, asked: Sequence[tuple[str, dict[str, Any]]], encode: Callable[..., list[int]], longest: int
) -> list[str]:
    prompts, params = [], []
    for text, options in asked:
        stop = options.get("until") or []
        most = int(options.get("max_gen_toks", options.get("max_new_tokens", _MOST_GENERATED)))
        sampled = bool(options.get("do_sample")) or float(options.get("temperature") or 0.0) > 0
        temperature = float(options.get("temperature") or 1.0) if sampled else 0.0
        params.append(
            SamplingParams(
                temperature=temperature,
                top_p=float(options.get("top_p", 1.0)),
                max_tokens=min(most, longest - 1),
                stop=tuple(each for each in ([stop] if isinstance(stop, str) else stop) if each),
                seed=0,
            )
        )
        prompts.append(encode(text)[-(longest - min(most, longest - 1)) :])
    return [_check(completion).text for completion in llm.generate(prompts, params)]


def _check(completion: Completion) -> Completion:
    if completion.error:
        raise BadInput(f"a task's prompt was refused: {completion.error}")
    return completion
