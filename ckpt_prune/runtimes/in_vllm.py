"""vLLM, on this machine's device; an output with code of its own runs in its Transformers backend."""

import time

import numpy as np
from vllm import LLM, SamplingParams

from ckpt_prune.runtimes.task import RuntimeAnswer, RuntimeTask


def run(task: RuntimeTask) -> RuntimeAnswer:
    length = task.windows.shape[1]
    model = LLM(
        task.folder,
        skip_tokenizer_init=True,
        load_format="safetensors",
        trust_remote_code=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=length + 1,
        max_num_seqs=4,
        max_logprobs=-1,
        logprobs_mode="raw_logprobs",
    )
    one = SamplingParams(max_tokens=1, temperature=0, logprobs=-1, detokenize=False)
    prompts = [{"prompt_token_ids": window[:p].tolist()} for window in task.windows for p in task.positions]
    logs = []
    for output in model.generate(prompts, one, use_tqdm=False):
        (logprob_of,) = output.outputs[0].logprobs
        row = np.full(max(logprob_of) + 1, -np.inf, np.float32)
        row[list(logprob_of)] = [each.logprob for each in logprob_of.values()]
        logs.append(row)
    prompt = [{"prompt_token_ids": task.windows[0][: length - task.generate].tolist()}]
    seconds = []
    for count in (1, task.generate):
        start = time.perf_counter()
        many = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, detokenize=False)
        model.reset_prefix_cache()
        model.generate(prompt, many, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
    return RuntimeAnswer(
        np.stack(logs).reshape(len(task.windows), len(task.positions), -1),
        (length - task.generate) / seconds[0],
        (task.generate - 1) / max(seconds[1] - seconds[0], 1e-9),
    )
