"""Runs inside vLLM's own virtual environment: one engine, driven by JSON lines on standard input.

Each line is a command and gets one ``RESULT {...}`` line on standard output:
``{"do": "generate", "prompts": [[...]], "max_tokens": 16, "together": true, "kill": pid,
"kill_after_steps": n}``, ``{"do": "reset"}``, ``{"do": "free_blocks"}``, ``{"do": "stop"}``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any


def main() -> None:
    settings = json.loads(sys.argv[1])
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    arguments: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "enforce_eager": True,
        "seed": 0,
        "block_size": 32,
        "max_num_batched_tokens": 256,
        "disable_log_stats": False,
    }
    arguments |= settings["llm"]
    if settings["connector"] is not None:
        arguments["kv_transfer_config"] = KVTransferConfig(**settings["connector"])
    llm = LLM(**arguments)
    engine = llm.llm_engine
    say(ready=True)

    count = 0
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "stop":
            break
        if command["do"] == "reset":
            say(reset=llm.reset_prefix_cache())
            continue
        if command["do"] == "free_blocks":
            scheduler = engine.engine_core.engine_core.scheduler
            steps = 0
            while scheduler.has_requests() and steps < 1000:
                engine.engine_core.engine_core.step()
                steps += 1
            pool = scheduler.kv_cache_manager.block_pool
            say(
                free=pool.get_num_free_blocks(),
                total=pool.num_gpu_blocks,
                left=len(scheduler.requests),
            )
            continue
        sampling = SamplingParams(
            temperature=0, max_tokens=command["max_tokens"], ignore_eos=True, detokenize=False
        )
        prompts = command["prompts"]
        batches = [prompts] if command.get("together") else [[prompt] for prompt in prompts]
        answers: list[dict[str, Any]] = []
        for batch in batches:
            names = []
            for prompt in batch:
                names.append(str(count))
                engine.add_request(str(count), {"prompt_token_ids": prompt}, sampling)
                count += 1
            done = {}
            steps = 0
            while engine.has_unfinished_requests():
                if command.get("kill") and steps == command["kill_after_steps"]:
                    os.kill(command["kill"], signal.SIGKILL)
                for output in engine.step():
                    if output.finished:
                        done[output.request_id] = output
                steps += 1
            answers += [
                {
                    "tokens": list(done[name].outputs[0].token_ids),
                    "cached": done[name].num_cached_tokens,
                    "finish": done[name].outputs[0].finish_reason,
                    "steps": steps,
                }
                for name in names
            ]
        say(answers=answers)
    engine.engine_core.shutdown()


def say(**result: Any) -> None:
    print("RESULT " + json.dumps(result), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
