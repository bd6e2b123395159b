"""Running a GGUF file in llama.cpp (package xllamacpp), in a process of its own, which llama.cpp may end."""

import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from ckpt_prune.checkpoint.scratch import scratch_folder
from ckpt_prune.common.child_process import python_command, safe_environment
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.extras import install
from ckpt_prune.common.memory import peak_bytes

INSTALL = f"{install('llamacpp')} (package xllamacpp, a prebuilt llama.cpp)"
TOP = 4096
"""Most log-probabilities that are asked for at once."""


@dataclass(frozen=True)
class LlamaCppTask:
    """A task for llama.cpp.

    Attributes:
        model: path of the file.
        context: tokens that are read at once.
        threads: of the processor.
        texts: to be split into tokens, with the tokens that the file itself adds.
        windows: token ids of each window.
        positions: after how many tokens of a window the next one is predicted.
        chats: conversations to put into the file's chat template.
        ends: tokens at which a text may end.
        generate: tokens to generate, to be timed.
        repeats: times that this is done; the fastest counts, as what else runs on the machine only slows it down.
        states: also return what the head reads at every token of the windows; of an encoder, its last hidden states.
        pooled: also return the embedding of each window, pooled as the file says.
        ranked: pairs of texts, of which a reranker gives scores: they take the place of embeddings, (pairs, 1).
        targets: for each window what a decoder reads behind an encoder that has read the window. The next token is
            predicted after each number of them in `places`; in the answer they are one window.
        places: of each target.
    """

    model: str
    context: int
    threads: int = 1
    texts: list[str] = field(default_factory=list)
    windows: list[list[int]] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    chats: list[list[dict[str, str]]] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    generate: int = 0
    repeats: int = 1
    states: bool = False
    pooled: bool = False
    ranked: list[list[str]] = field(default_factory=list)
    targets: list[list[int]] = field(default_factory=list)
    places: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class Answer:
    """The results of a task.

    Attributes:
        tokens: of each text.
        prompts: each conversation in the template.
        prompt_tokens: of each prompt, with those that the file itself adds.
        stops: which of the ends end a text.
        ids: token ids, (windows, positions, top), the likeliest first.
        logs: their log-probabilities, float32.
        actual: log-probability of the token that follows in the window, (windows, positions).
        prompt_speed: tokens a second that are read.
        generation_speed: tokens a second that are generated.
        memory: most bytes that the process took.
        states: what the head reads, behind the last norm, (windows, length, hidden), float32; (0,) if not asked for.
        pooled: embeddings, (windows, hidden), float32, of any length; (0,) if not asked for.
    """

    tokens: list[list[int]]
    prompts: list[str]
    prompt_tokens: list[list[int]]
    stops: list[int]
    ids: "np.ndarray[Any, Any]"
    logs: "np.ndarray[Any, Any]"
    actual: "np.ndarray[Any, Any]"
    prompt_speed: float
    generation_speed: float
    memory: int
    states: "np.ndarray[Any, Any]"
    pooled: "np.ndarray[Any, Any]"


def has_runtime() -> bool:
    """Return whether llama.cpp is installed."""
    return find_spec("xllamacpp") is not None


def require_runtime() -> None:
    """Refuse where llama.cpp is not installed."""
    if not has_runtime():
        raise UserError(f"llama.cpp is not installed, and the file is proven in it: {INSTALL}, or give --no-validate")


def run_llama_cpp(task: LlamaCppTask, scratch: Path | None = None) -> Answer:
    """Do a task in a new process, which ends with this one.

    Args:
        scratch: an empty folder for what the processes exchange; None: one in TMPDIR.

    Raises:
        UserError: llama.cpp is not installed, cannot load the file, or ended; its own message is passed on.
    """
    require_runtime()
    with nullcontext(scratch) if scratch is not None else scratch_folder() as place:
        values = asdict(task) | {"model": str(Path(task.model).absolute())}
        (place / "task.json").write_text(json.dumps(values), encoding="utf-8")
        environment = safe_environment() | {"OMP_NUM_THREADS": str(task.threads)}
        process = subprocess.run(
            python_command(__name__, str(place)),
            env=environment,
            cwd=place,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if process.returncode or not (place / "answer.json").is_file():
            raise UserError(f"llama.cpp cannot run {task.model}: {_reason(process.stderr, process.returncode)}")
        answer = json.loads((place / "answer.json").read_text(encoding="utf-8"))
        with np.load(place / "answer.npz") as arrays:
            return Answer(**answer, **{name: arrays[name] for name in arrays.files})


def _reason(log: str, code: int) -> str:
    """The line of llama.cpp's log that says why it stopped."""
    lines = [re.sub(r"^[\d. ]*[A-Z] ", "", line).strip() for line in log.splitlines()]
    telling = [line for line in lines if re.search(r"error|failed|assert|wrong|missing|unknown|invalid", line, re.I)]
    named = telling[0] if telling else next((line for line in reversed(lines) if line), "it said nothing")
    return f"{named[:300]} (exit code {code})"


# ---- in the other process --------------------------------------------------------------------------------------------


def _start(task: LlamaCppTask, *, embeds: bool, pools: bool = False) -> Any:
    """Start a server; one that embeds gives states of all tokens, or pools them as the file says, or ranks."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = task.model
    params.n_ctx = task.context + 16
    params.n_parallel = 1
    params.n_gpu_layers = 0
    params.warmup = params.fit_params = params.ui = False
    params.verbosity = 1
    params.swa_full = True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = task.threads
    # As PyTorch: a cache in float32, and attention in the plain order.
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if embeds:  # a whole window in one batch
        params.embedding, params.n_batch, params.n_ubatch = True, params.n_ctx, params.n_ctx
    if embeds and not pools:
        params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_NONE
    elif task.ranked:
        params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_RANK
    return xllamacpp.Server(params)


def _embed(server: Any, windows: list[list[int]]) -> list[Any]:
    """Return the states of each window, or the one embedding in a list."""
    return [_post(server, "/embedding", {"content": each, "embd_normalize": -1})[0]["embedding"] for each in windows]


def _serve(task: LlamaCppTask) -> tuple[dict[str, Any], dict[str, Any]]:
    server = _start(task, embeds=task.states or task.pooled, pools=not task.states)
    prompts = [_post(server, "/apply-template", {"messages": chat})["prompt"] for chat in task.chats]
    tokens, prompt_tokens = (
        [
            _post(server, "/tokenize", {"content": text, "add_special": True, "parse_special": True})["tokens"]
            for text in texts
        ]
        for texts in (task.texts, prompts)
    )
    plain = _post(server, "/tokenize", {"content": "a"})["tokens"][-1]
    stops = [end for end in task.ends if _complete(server, [plain], end)["stop_type"] == "eos"]
    ids, logs, actual = [], [], []
    for window in task.windows:
        for position in task.positions:
            predicted = _predict(server, window[:position], TOP, window[position])
            if not predicted:  # the server says nothing of half a character or of an end of text
                predicted = _predict(server, window[:position], 2**30, plain)
                every = {each["id"]: each["logprob"] for each in predicted[0]["top_logprobs"]}
                predicted[0]["logprob"] = every[window[position]]
            ids.append([each["id"] for each in predicted[0]["top_logprobs"][:TOP]])
            logs.append([each["logprob"] for each in predicted[0]["top_logprobs"][:TOP]])
            actual.append(predicted[0]["logprob"])
    started = perf_counter()
    vectors = _embed(server, task.windows) if task.states or task.pooled else []
    read = sum(map(len, task.windows)) / (perf_counter() - started) if vectors else 0.0
    states, pooled = (vectors, []) if task.states else ([], vectors)
    if task.states and task.pooled:
        pooled = _embed(_start(task, embeds=True, pools=True), task.windows)
    if task.ranked:
        ranker = _start(task, embeds=True, pools=True)
        asked = ({"query": query, "documents": [text]} for query, text in task.ranked)
        pooled = [[[_post(ranker, "/rerank", each)["results"][0]["relevance_score"]]] for each in asked]
    speeds = {"prompt_per_second": read, "predicted_per_second": 0.0}
    if task.generate:
        prompt = task.windows[0][: task.context - task.generate]
        body = {
            "prompt": prompt,
            "n_predict": task.generate,
            "ignore_eos": True,
            "cache_prompt": False,
            "temperature": 0,
        }
        timings = [server.handle_completions(body)["timings"] for _ in range(task.repeats)]
        speeds = {name: max(each[name] for each in timings) for name in speeds}
    shape = (len(task.windows), len(task.positions))
    top = -1 if ids else 0
    answer = {
        "tokens": tokens,
        "prompts": prompts,
        "prompt_tokens": prompt_tokens,
        "stops": stops,
        "prompt_speed": speeds["prompt_per_second"],
        "generation_speed": speeds["predicted_per_second"],
        "memory": peak_bytes() or 0,
    }
    arrays: dict[str, Any] = {
        "ids": np.array(ids, dtype=np.int64).reshape(*shape, top),
        "logs": np.array(logs, dtype=np.float32).reshape(*shape, top),
        "actual": np.array(actual, dtype=np.float32).reshape(shape),
        "states": np.array(states, dtype=np.float32),
        "pooled": np.array([each[0] for each in pooled], dtype=np.float32),
    }
    return answer, arrays


def _run_pairs(task: LlamaCppTask) -> tuple[dict[str, Any], dict[str, Any]]:
    """Do a task in which an encoder reads windows, and a decoder targets."""
    from ckpt_prune.gguf.llama_interface import EncoderDecoder

    model = EncoderDecoder(task.model, context=task.context, threads=task.threads)
    logs, actual, states, seconds, read = [], [], [], [0.0, 0.0], [0, 0]
    for window, target, places in zip(task.windows, task.targets, task.places, strict=True):
        started = perf_counter()
        states += [*model.encode(window)]
        encoded = perf_counter()
        predicted = dict(enumerate(model.decode(target[:-1]), 1))
        seconds = [seconds[0] + encoded - started, seconds[1] + perf_counter() - encoded]
        read = [read[0] + len(window), read[1] + len(predicted)]
        for place in places:
            logits = predicted[place].astype(np.float64)
            logits -= logits.max()
            logs.append(logits - np.log(np.exp(logits).sum()))
            actual.append(logs[-1][target[place]])
    every = np.array(logs)
    ids = np.argsort(-every, axis=-1, kind="stable")[:, :TOP]
    answer = {
        "tokens": [model.split(text) for text in task.texts],
        "prompts": [],
        "prompt_tokens": [],
        "stops": [end for end in task.ends if model.ends(end)],
        "prompt_speed": read[0] / seconds[0],
        "generation_speed": read[1] / seconds[1],
        "memory": peak_bytes() or 0,
    }
    arrays: dict[str, Any] = {
        "ids": ids[None],
        "logs": np.take_along_axis(every, ids, -1)[None].astype(np.float32),
        "actual": np.array(actual, dtype=np.float32)[None],
        "states": np.array(states, dtype=np.float32),
        "pooled": np.array([], dtype=np.float32),
    }
    return answer, arrays


def _predict(server: Any, prompt: list[int], top: int, token: int) -> list[dict[str, Any]]:
    """Return the log-probability of `token`, and those of the likeliest tokens, before sampling: one dict or none."""
    answer = _complete(server, prompt, token, n_probs=top, cache_prompt=True)
    found: list[dict[str, Any]] = answer.get("completion_probabilities") or []
    return found


def _complete(server: Any, prompt: list[int], token: int, **more: Any) -> Any:
    """Let a token come next, whatever is likely."""
    body = {"prompt": prompt, "n_predict": 1, "temperature": 0, "logit_bias": [[token, 1000.0]]}
    return _post(server, "/completion", body | more)


def _post(server: Any, path: str, body: dict[str, Any]) -> Any:
    from urllib.request import ProxyHandler, Request, build_opener

    request = Request(server.listening_address + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with build_opener(ProxyHandler({})).open(request) as reply:
        return json.loads(reply.read())


def _main(folder: Path) -> None:
    task = LlamaCppTask(**json.loads((folder / "task.json").read_text(encoding="utf-8")))
    answer, arrays = (_run_pairs if task.targets else _serve)(task)
    np.savez(folder / "answer.npz", **arrays)
    (folder / "answer.json").write_text(json.dumps(answer), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # the server's threads need not end in order


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
