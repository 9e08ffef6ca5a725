# ruff: noqa: E501 (rows of tables)
"""docs/keys.md: every configuration key, and what becomes of vLLM's engine arguments, from the code.

python -m tests.keys_page > docs/keys.md
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeGuard, get_args, get_origin

from quire import config
from quire.loader import adapter
from quire.loader.gguf import metadata as gguf_metadata
from quire.request.sampling_params import _UNUSED_DEFAULTS
from quire.triton import vllm_config

ROOT = Path(__file__).resolve().parent.parent
GENERATION_DEFAULTS = {
    "do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty",
    "no_repeat_ngram_size", "max_new_tokens", "min_new_tokens", "stop_strings", "suppress_tokens",
    "bad_words_ids", "eos_token_id",
}  # fmt: skip
GENERATION_WITHOUT_EFFECT = {
    # of beams, which no key asks for here; of encoders; of an answer's form; of caches and speculation
    "early_stopping", "length_penalty", "num_return_sequences", "encoder_no_repeat_ngram_size",
    "decoder_start_token_id", "is_encoder_decoder", "output_attentions", "output_hidden_states",
    "output_scores", "output_logits", "return_dict_in_generate", "bos_token_id", "pad_token_id",
    "use_cache", "cache_implementation", "cache_config", "max_cache_len", "low_memory", "compile_config",
    "continuous_batching_config", "disable_compile", "is_assistant", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "assistant_confidence_threshold", "prompt_lookup_num_tokens",
    "max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind", "target_lookbehind",
    "use_mtp", "prefill_chunk_size", "renormalize_logits", "remove_invalid_values", "speculation_type",
    "assistant_ensemble_weight",
    "transformers_version", "_from_model_config",
}  # fmt: skip

PARTS = {
    config.ModelConfig: "Model, device and precision",
    config.CacheConfig: "KV cache, its tiers, result cache",
    config.SchedulerConfig: "Scheduling",
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
    if field.default_factory is not dataclasses.MISSING or dataclasses.is_dataclass(field.default):
        return "`{}`"
    value = field.default
    if value is None or value == "":
        return "unset"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def keys_inside(kind: Any) -> type | None:
    """Dataclass of the keys that a JSON object of the annotation `kind` has, or in a dict each of its values;
    None: the keys are free, or it is no object."""
    inner = get_args(kind)[1] if get_origin(kind) is dict else kind
    return inner if isinstance(inner, type) and dataclasses.is_dataclass(inner) else None


def table(part: type) -> Iterator[str]:
    """The keys of a part of the configuration, or of an object in it."""
    yield from ("", "| key | may be | default | meaning |", "| --- | --- | --- | --- |")
    docs, kinds = docs_of(part), config._kinds(part)
    for field in dataclasses.fields(part):
        kind = config._described(config.unless_none(kinds[field.name]))
        meaning = docs[field.name].replace("|", "\\|").replace("None: ", "unset: ")
        yield f"| `{field.name}` | {kind} | {default_of(field)} | {meaning} |"


def lines() -> Iterator[str]:
    yield "# Configuration keys"
    yield ""
    yield (
        "Keys of `1/quire.json`, of `quire serve --option KEY=VALUE`, of `quire.LLM`, and parameters of "
        "config.pbtxt; see [configuration.md](configuration.md). Made from `backend/quire/config.py` by "
        "`make status`."
    )
    yield ""
    yield (
        "Models whose engine keys are equal share one engine: what is written into the quire.json of `generator` belongs into that of "
        "`generator_unary`, too, or the second one gets an engine, weights and cache of its own. `--option` writes both."
    )
    for part, title in PARTS.items():
        yield from ("", f"## {title}", *table(part))
        for key, kind in config._kinds(part).items():
            if (inner := keys_inside(kind)) is not None:
                where = "each value of " * (inner is not kind) + f"the object `{key}`"
                yield from ("", f"### Keys of {where}", *table(inner))
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
    yield "| `kv_events_config` | `kv_events`: `endpoint`, `replay_endpoint`, `topic`, if `enable_kv_cache_events` is true; the sizes are without effect |"
    yield "| `quantization` | must name what the checkpoint's weights are; the parameter `quantization` of config.pbtxt quantises at load |"
    for name in sorted(vllm_config._ONE):
        yield f"| `{name}` | 1 alone |"
    for name in sorted(vllm_config._WITHOUT_EFFECT):
        yield f"| `{name}` | without effect, named in a log line |"
    yield from VLLM_REFUSED
    yield from TENSORRT_LLM
    yield from _of_files()


TRAINING = (
    "attention_dropout", "embd_pdrop", "resid_pdrop", "residual_dropout", "initializer_range",
    "embedding_initializer_range", "router_aux_loss_coef", "router_jitter_noise",
)  # fmt: skip
WITHOUT_EFFECT = {
    *TRAINING,
    # what a call of transformers returns, and who wrote the file
    "output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "use_cache",
    "chunk_size_feed_forward", "label2id", "is_encoder_decoder", "_name_or_path", "transformers_version",
    "eod_token_id",
    # training of encoders, their heads for masked tokens, and tokens that the tokenizer adds
    "attention_probs_dropout_prob", "hidden_dropout_prob", "classifier_dropout", "embedding_dropout",
    "mlp_dropout", "initializer_cutoff_factor", "decoder_bias", "sparse_prediction",
    "sparse_pred_ignore_index", "deterministic_flash_attn", "cls_token_id", "sep_token_id",
    # split products with the same result, and the sum of two other keys
    "pretraining_tp", "qk_head_dim",
    # Mamba-2: how fast transformers computes, what it ignores, layers that are not loaded, and the steps of
    # weights before training; transformers also limits the steps of a prompt by time_step_min, and NVIDIA's
    # own code does not
    "chunk_size", "mamba_chunk_size", "use_mamba_kernels", "mamba_ssm_cache_dtype", "num_logits_to_keep",
    "moe_shared_expert_overlap", "residual_in_fp32", "expand", "hidden_dropout", "mtp_layers_block_type",
    "rescale_prenorm_residual", "time_step_min", "time_step_max", "time_step_floor",
}  # fmt: skip
"""Keys of transformers' text models that nothing here reads."""
OLDER = {
    "rope_theta", "rope_scaling", "partial_rotary_factor", "torch_dtype", "dtype", "quantization_config",
    "compression_config", "text_config", "architectures", "model_type", "scoring_func", "moe_layer_freq",
    "is_causal", "use_sliding_window", "max_window_layers",
}  # fmt: skip
"""Keys of files that transformers' classes of today have by other names, in other places, or not at all."""
_FORMED = {f"moe_layer_{end}" for end in ("start_index", "end_index", "interval")}
"""Keys that the code puts together."""
_READERS = (
    "backend/quire/models", "backend/quire/loader", "backend/quire/layers", "backend/quire/config.py",
)  # fmt: skip


def config_keys() -> tuple[set[str], set[str]]:
    """Keys of files that our code names, and keys of transformers' classes of text models that it does not."""
    import transformers

    from quire.models.registry import ARCHITECTURES

    named, known = set(_FORMED), set(OLDER)
    for file in (file for place in map(ROOT.joinpath, _READERS) for file in (*place.rglob("*.py"), place)):
        if file.suffix == ".py":
            nodes = list(ast.walk(ast.parse(file.read_text("utf-8"))))
            named |= {one.value for one in nodes if _is_name(one)}
            known |= {key for key in map(_asked_for, nodes) if key and not key.startswith("vision")}
    for architecture in ARCHITECTURES:
        if (kind := getattr(transformers, architecture, None)) is not None:
            values = kind.config_class().get_text_config().to_dict()
            known |= {name for name in values if not name.endswith("_config")}
    return known & named, known - named


def _is_name(node: ast.AST) -> TypeGuard[ast.Constant]:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier()


def _asked_for(node: ast.AST) -> str:
    """The key in `hf.get("key")` and the like; empty: it is another node."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
        return ""
    of_file = isinstance(node.func.value, ast.Name) and node.func.value.id == "hf"
    return str(node.args[0].value) if of_file and _is_name(node.args[0]) else ""


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def _of_files() -> Iterator[str]:
    """What becomes of the keys in a checkpoint's and an adapter's files."""
    used, unused = config_keys()
    yield from ("", "## Keys of checkpoints' files", "")
    yield (
        "A key that is read has its meaning in transformers (llama.cpp, PEFT), and a value of it that cannot be computed "
        "is refused by name. Other keys change nothing in transformers, and nothing here; those that its class ignores "
        "though a file means something by them are refused ([checkpoints](checkpoints.md))."
    )
    yield from ("", "| file | keys | here |", "| --- | --- | --- |")
    yield f"| config.json | {_listed(used)} | read |"
    yield f"| | {_listed(unused)} | without effect on what is generated |"
    yield "| | `vision_config`, and keys of the towers | transformers' own tower reads them |"
    yield f"| generation_config.json | {_listed(GENERATION_DEFAULTS)} | defaults of requests |"
    yield f"| | {_listed(_UNUSED_DEFAULTS)} | not used; a log line names those that are set |"
    yield f"| | {_listed(GENERATION_WITHOUT_EFFECT)} | without effect: of beams, encoders, an answer's form, caches, speculation |"
    yield "| tokenizer_config.json | all | transformers reads them; `eos_token` and `added_tokens_decoder` end sequences, too |"
    yield "| GGUF, of the architecture | sizes, heads, norms, experts, `sliding_window`, `rope.*` | read; a log line at the load names each key that is not, so what it does not name is read |"
    yield f"| | {_listed('rope.scaling.' + key for key in gguf_metadata._UNSUPPORTED_SCALING)} | refused where they change something |"
    yield "| GGUF, `tokenizer.ggml.*` | `model`, `pre`, `tokens`, `token_type`, `scores`, `merges`, ids of special tokens, `add_*`, `tokenizer.chat_template` | read, as is `general.architecture`; others of both have no effect |"
    yield f"| adapter_config.json | {_listed(adapter._KNOWN)} | read, or of training |"
    yield f"| | {_listed(adapter._UNSUPPORTED)}, other values of `peft_type` and `bias` | refused |"
    yield "| | others | not used; a log line names those that are set |"


VLLM_REFUSED = (
    "",
    "Of those that are refused some have a counterpart, as parameters of config.pbtxt: `speculative_config`: `num_draft_tokens`, `draft_model`. "
    "`scheduling_policy`: `queue_policy`. `tool_call_parser`: `tool_parser`. `kv_transfer_config`: `kv_connector`. `swap_space` has no effect; "
    "`host_cache_memory` is memory for blocks beside the device. What a file does not state has our default, for example `max_num_seqs` 64 and "
    "`max_num_batched_tokens` 512.",
)
TENSORRT_LLM = (
    "",
    "## TensorRT-LLM's parameters of config.pbtxt",
    "",
    'A parameter of a `tensorrt_llm` model under `backend: "quire"` is refused by name; what to write in its place:',
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
    "| `max_queue_delay_microseconds`, `dynamic_batching` | none: a step batches what is ready |",
    "| `max_beam_width` | `beam_width` of a request |",
    "| `decoding_mode` | of a request: `top_k`, `top_p`, `beam_width`; speculation: the next row |",
    "| `lookahead_*`, `medusa_choices`, `eagle_choices` | `num_draft_tokens`, `draft_model` |",
    "| `lora_cache_*`, `lora_prefetch_dir` | `enable_lora`, `max_loras`, `max_cpu_loras`, `lora_modules`, `lora_root` |",
    "| `gpu_device_ids`, `participant_ids` | `instance_group` of config.pbtxt; `tensor_parallel_size` |",
    "| `exclude_input_in_output` | a parameter of a request; `dialect` sets its default |",
    "| `cancellation_check_period_ms`, `stats_check_period_ms`, `recv_poll_period_ms` | none: nothing to set |",
    "| `max_attention_window_size`, `sink_token_length` | the checkpoint's own window and sinks |",
    "| `cuda_graph_mode` | on by itself on a GPU; `enforce_eager` switches it off |",
    "| `FORCE_CPU_ONLY_INPUT_TENSORS` | Triton's own: it may stay |",
    "| all others | leave them out: there is nothing to set |",
    "",
    "What becomes of the folders `preprocessing`, `tensorrt_llm`, `postprocessing`, `tensorrt_llm_bls` and `ensemble`: "
    "[before and after](parameters.md#a-tensorrt-llm-repository-before-and-after).",
)


def page() -> str:
    return "\n".join(lines()) + "\n"


if __name__ == "__main__":
    print(page(), end="")
