# ruff: noqa: E501 (rows of tables)
"""docs/keys.md: every configuration key, and what becomes of vLLM's engine arguments, from the code.

python -m tests.keys_page > docs/keys.md
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

from quire import config
from quire.triton import vllm_config

PARTS = {
    config.ModelConfig: "Model, device and precision",
    config.CacheConfig: "KV cache, its tiers, result cache",
    config.SchedulerConfig: "Scheduling",
    config.TenantLimits: "Limits of one tenant: values of `tenants` and of `default_tenant`",
    config.AdapterConfig: "LoRA adapters",
    config.FrontendConfig: "Frontend: texts, answers, streams",
}


def docs_of(part: type) -> dict[str, str]:
    """The text below each field, on one line."""
    (made,) = ast.parse(inspect.getsource(part)).body
    assert isinstance(made, ast.ClassDef)
    found: dict[str, str] = {}
    for field, behind in zip(made.body, made.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            assert isinstance(behind, ast.Expr) and isinstance(behind.value, ast.Constant), field.target.id
            found[field.target.id] = " ".join(str(behind.value.value).split())
    return found


def default_of(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return f"`{field.default_factory()!r}`"
    value = field.default
    if value is None or value == "":
        return "unset"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def lines() -> Iterator[str]:
    yield "# Configuration keys"
    yield ""
    yield (
        "Keys of `1/quire.json`, of `quire serve --option KEY=VALUE`, of `quire.LLM`, and parameters of "
        "config.pbtxt; see [configuration.md](configuration.md). Made from `backend/quire/config.py` by "
        "`make status`."
    )
    for part, title in PARTS.items():
        yield from (
            "",
            f"## {title}",
            "",
            "| key | may be | default | meaning |",
            "| --- | --- | --- | --- |",
        )
        docs, kinds = docs_of(part), config._kinds(part)
        for field in dataclasses.fields(part):
            kind = config._described(config.unless_none(kinds[field.name]))
            meaning = docs[field.name].replace("|", "\\|").replace("None: ", "unset: ")
            yield f"| `{field.name}` | {kind} | {default_of(field)} | {meaning} |"
    yield from ("", "## vLLM's engine arguments", "")
    yield (
        f"In vllm_backend's `1/{vllm_config.FILE}`. Arguments that are not here are refused by name, and so are "
        "values that ours do not allow; null is unset."
    )
    yield from ("", "| argument | here |", "| --- | --- |")
    for name in sorted(vllm_config._SAME):
        values = [
            f"`{theirs}` is `{ours}`" for (of, theirs), ours in vllm_config._VALUES.items() if of == name
        ]
        yield f"| `{name}` | the key of that name{'; ' * bool(values)}{', '.join(values)} |"
    for name, ours in sorted(vllm_config._RENAMED.items()):
        yield f"| `{name}` | `{ours}` |"
    yield "| `quantization` | what the checkpoint's weights are; else refused: our key of that name does it at load |"
    for name in sorted(vllm_config._ONE):
        yield f"| `{name}` | 1 alone |"
    for name in sorted(vllm_config._WITHOUT_EFFECT):
        yield f"| `{name}` | without effect, named in a log line |"
    yield from TENSORRT_LLM


TENSORRT_LLM = (
    "",
    "## TensorRT-LLM's parameters of config.pbtxt",
    "",
    "A config.pbtxt of `tensorrt_llm` names an engine that was built for one GPU. A parameter of it under "
    '`backend: "quire"` is refused by name; what to write in its place:',
    "",
    "| parameter | here |",
    "| --- | --- |",
    "| `gpt_model_path`, `engine_dir`, `encoder_model_path` | `model`: a checkpoint, not an engine |",
    "| `tokenizer_dir`, `xgrammar_tokenizer_info_path` | `tokenizer`, where it is not beside the checkpoint |",
    "| `kv_cache_free_gpu_mem_fraction` | `gpu_memory_utilization`, a share of all the device's memory, weights among it |",
    "| `max_tokens_in_paged_kv_cache` | `num_blocks` times `block_size`, or `kv_cache_memory` in bytes |",
    "| `kv_cache_host_memory_bytes` | `host_cache_memory` |",
    "| `enable_kv_cache_reuse` | `enable_prefix_caching` (on by default) |",
    "| `gpt_model_type`, `batching_type` | in-flight batching always |",
    "| `enable_chunked_context` | chunked prefill always; `max_num_batched_tokens` bounds a step |",
    "| `batch_scheduler_policy` | none: a request is admitted when its prompt fits, and preempted if need be |",
    "| `max_queue_size` | `max_waiting_requests` |",
    "| `max_beam_width` | `beam_width` of a request |",
    "| `decoding_mode`, `lookahead_*`, `medusa_choices`, `eagle_choices` | `num_draft_tokens`, `draft_model` |",
    "| `lora_cache_*`, `lora_prefetch_dir` | `enable_lora`, `max_loras`, `max_cpu_loras`, `lora_modules`, `lora_root` |",
    "| `gpu_device_ids`, `participant_ids` | `instance_group` of config.pbtxt; `tensor_parallel_size` |",
    "| `exclude_input_in_output` | a parameter of a request |",
    "| `cancellation_check_period_ms`, `stats_check_period_ms`, `recv_poll_period_ms` | none: nothing to set |",
)


def page() -> str:
    return "\n".join(lines()) + "\n"


if __name__ == "__main__":
    print(page(), end="")
