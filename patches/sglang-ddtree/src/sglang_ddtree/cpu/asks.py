"""What clients ask: bodies of /generate and /v1/completions, checked and turned into one form."""

from __future__ import annotations

import math
import secrets
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

from sglang_ddtree.cpu.decode import Sampling

# Sampling parameters that would change the tokens and that this engine does not have: their neutral values.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0, 0.0, None),
    "presence_penalty": (0, 0.0, None),
    "repetition_penalty": (1, 1.0, None),
    "min_new_tokens": (0, None),
    "n": (1, None),
    "best_of": (1, None),
    "logit_bias": (None, {}),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
    "stop_regex": (None, []),
    "suffix": (None, ""),
    "echo": (False, None),
}
# All of SGLang's (sampling/sampling_params.py).
PARAMETERS = frozenset({
    *NEUTRAL.keys() - {"best_of", "suffix", "echo"}, "max_new_tokens", "stop", "stop_token_ids", "temperature", "top_p",
    "top_k", "min_p", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim",
    "stream_interval", "sampling_seed", "custom_params", "stop_strs", "stop_regex_strs", "stop_str_max_len",
    "stop_regex_max_len", "is_normalized",
})  # fmt: skip
EPSILON = 1e-6


class BadRequest(ValueError):
    """Answered with status 400."""


class NoJson(BadRequest):
    """The body is not what a path takes at all; SGLang words it like this wherever it is posted."""


class Unforeseen(Exception):
    """SGLang does not foresee this and answers with status 500."""


@dataclass(frozen=True)
class Ask:
    prompt: list[int]
    limit: int
    sampling: Sampling
    stop: tuple[str, ...] = ()
    stop_tokens: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None  # how many alternatives to list for each token; None: no log-probabilities
    rid: str = field(default_factory=lambda: uuid.uuid4().hex)


def parse_generate(body: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[list[Ask], bool]:
    """The asks of a /generate body, and whether it was a list of prompts."""
    prompts = body.get("text") if body.get("text") is not None else body.get("input_ids")
    many = _many(prompts)
    if not prompts:
        raise BadRequest("Either text, input_ids or input_embeds should be provided.")
    if many and body.get("stream"):
        raise BadRequest("the CPU engine streams one prompt at a time")
    params = body.get("sampling_params") or {}
    if not isinstance(params, Mapping):
        raise BadRequest("sampling_params must be one object")
    if unknown := sorted(params.keys() - PARAMETERS):
        raise Unforeseen(f"sampling_params has no {', '.join(unknown)}")
    logprobs = int(body.get("top_logprobs_num") or 0) if body.get("return_logprob") else None
    asks = [
        _ask(_ids(prompt, tokenizer), params, "max_new_tokens", 128, logprobs, body.get("rid"))
        for prompt in (prompts if many else [prompts])
    ]
    return asks, many


def parse_completions(body: Mapping[str, Any], tokenizer: Tokenizer) -> list[Ask]:
    prompts = body.get("prompt")
    if not prompts:
        raise BadRequest("Prompt cannot be empty")
    many = _many(prompts)
    if many and body.get("stream"):
        raise BadRequest("the CPU engine streams one prompt at a time")
    if body.get("logprobs") is not None:
        raise BadRequest("logprobs of /v1/completions are not served by the CPU engine; /generate has them")
    params = dict(body, sampling_seed=body.get("seed"))
    return [
        _ask(_ids(prompt, tokenizer), params, "max_tokens", 16, None, None)
        for prompt in (prompts if many else [prompts])
    ]


def _many(prompts: Any) -> bool:
    return isinstance(prompts, list) and bool(prompts) and isinstance(prompts[0], (str, list))


def _ids(prompt: str | list[int], tokenizer: Tokenizer) -> list[int]:
    if isinstance(prompt, str):
        return list(tokenizer.encode(prompt).ids) or [0]
    vocab = tokenizer.get_vocab_size()
    if not all(isinstance(token, int) and 0 <= token < vocab for token in prompt):
        raise BadRequest(f"The input_ids hold ids outside the vocabulary of {vocab}.")
    return list(prompt)


def _ask(
    prompt: list[int], params: Mapping[str, Any], limit_name: str, limit: int, logprobs: int | None, rid: str | None
) -> Ask:
    for name, neutral in NEUTRAL.items():
        if name in params and params[name] not in neutral:
            raise BadRequest(f"{name} is not implemented in the CPU engine")
    wanted = params.get(limit_name)
    limit = limit if wanted is None else _number(limit_name, wanted, int)
    if limit < 0:
        raise BadRequest(f"max_new_tokens must be at least 0, got {limit}.")
    stop = params.get("stop") or ()
    return Ask(
        prompt=prompt,
        limit=limit,
        sampling=_sampling(params),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_tokens=frozenset(params.get("stop_token_ids") or ()),
        ignore_eos=bool(params.get("ignore_eos")),
        logprobs=logprobs,
        rid=rid or uuid.uuid4().hex,
    )


def _sampling(params: Mapping[str, Any]) -> Sampling:
    """SGLang's defaults: temperature 1, no filter; a temperature of 0 is greedy."""
    temperature = _number("temperature", _or(params, "temperature", 1.0), float)
    top_k = _number("top_k", _or(params, "top_k", -1), int)
    top_p = _number("top_p", _or(params, "top_p", 1.0), float)
    min_p = _number("min_p", _or(params, "min_p", 0.0), float)
    for holds, law in (
        (math.isfinite(temperature) and temperature >= 0, "temperature must be a non-negative finite number, got "),
        (0 < top_p <= 1, "top_p must be in (0, 1], got "),
        (0 <= min_p <= 1, "min_p must be in [0, 1], got "),
        (top_k == -1 or top_k >= 1, "top_k must be -1 (disable) or at least 1, got "),
    ):
        if not holds:
            raise BadRequest(f"{law}{_or(params, law.split()[0], None)}.")
    seed = params.get("sampling_seed")
    return Sampling(
        temperature=0.0 if temperature < EPSILON or top_k == 1 else temperature,
        top_k=None if top_k == -1 else top_k,
        top_p=top_p,
        min_p=min_p,
        seed=secrets.randbits(31) if seed is None else int(seed),
    )


def _or(params: Mapping[str, Any], name: str, default: Any) -> Any:
    value = params.get(name)
    return default if value is None else value


def _number(name: str, value: Any, kind: type) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise BadRequest(f"{name} must be a number, got {value!r}.")
    return kind(value)
