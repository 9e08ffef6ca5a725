"""Pooling: how embeddings and scores are computed from a model's final hidden states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from quire.errors import CheckpointError
from quire.layers.hf_config import HFConfig, read_json
from quire_common.checkpoint_files import check_directory
from quire_common.errors import is_name, shown

PoolingMode = Literal["last", "mean", "cls"]
"""Hidden state that a prompt is pooled to: that of its last token, the mean over all tokens, or that of its
first token."""
Activation = Literal["identity", "sigmoid", "softmax"]

_MODES: dict[str, PoolingMode] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
}
CLASSIFIER = "ForSequenceClassification"
"""End of the names of classifiers' architectures."""
MAX_LABELS = 2**16
MAX_LABEL_LENGTH = 256
_PROBLEM_TYPES: dict[str, Activation] = {
    "regression": "identity",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
_FUNCTIONS: dict[str, Activation] = {"Identity": "identity", "Sigmoid": "sigmoid", "Softmax": "softmax"}
"""Activations by the names of torch's modules, which sentence-transformers states."""


@dataclass(frozen=True, slots=True)
class Classifier:
    """Description of the scores that a checkpoint gives: one for each label."""

    labels: tuple[str, ...]
    activation: Activation
    """Function that makes scores of the logits, unless a request wants the logits themselves."""


@dataclass(frozen=True, slots=True)
class Pooling:
    """How a prompt's final hidden states become an embedding or scores, and whether the model generates
    tokens or is an encoder.

    The defaults apply to decoders that state nothing: the last token's hidden state, normalised to length 1,
    and no scores.
    """

    mode: PoolingMode = "last"
    normalizes: bool = True
    """Whether an embedding is normalised to length 1. That is done after it is cut to fewer dimensions."""
    why_not: str = ""
    """Reason why embeddings are not supported; empty: they are."""
    classifier: Classifier | None = None
    """Scores that the model gives; None: it gives none."""
    token_ids: tuple[int, int] | None = None
    """Ids of the tokens for no and yes. The logit of a score is that of yes less that of no, after the last
    token. None: the checkpoint has a head for scores, or there are none."""
    generates: bool = True
    """Whether the model generates tokens."""
    is_encoder: bool = False
    """Whether the model is an encoder, whose tokens also see those after them. A prompt is computed in one
    step then, and nothing is cached."""

    @property
    def num_scores(self) -> int:
        return 0 if self.classifier is None else len(self.classifier.labels)


def read_pooling(checkpoint: Path, default: PoolingMode = "last") -> Pooling:
    """Reads how a checkpoint pools, from sentence-transformers' modules.json and the config.json files that
    it names.

    If the pooling is not supported, the result's `why_not` gives the reason.

    Args:
        checkpoint: a directory, or a file, for which the defaults apply.
        default: mode of a checkpoint without modules.json, or whose modules.json lists no pooling module.

    Raises:
        CheckpointError: a file is missing or broken, or must not be read.
    """
    file = checkpoint / "modules.json"
    if not file.is_file():
        return Pooling(default)
    modules = read_json(file, list)
    if not all(isinstance(module, Mapping) for module in modules):
        raise CheckpointError(f"{file}: must be a list of objects")
    mode, normalizes = default, False
    for module in modules:
        kind = str(module.get("type")).rpartition(".")[2]
        if kind == "Pooling":
            stated = read_json(_folder(file, module.get("path")) / "config.json")
            modes = [name for name in stated if name.startswith("pooling_mode_") and stated[name] is True]
            if len(modes) != 1 or modes[0] not in _MODES:
                return Pooling(why_not=f"the checkpoint pools by {', '.join(modes) or 'nothing'}")
            mode = _MODES[modes[0]]
        elif kind == "Normalize":
            normalizes = True
        elif kind != "Transformer":
            return Pooling(why_not=f"the checkpoint has a module {kind}")
    return Pooling(mode, normalizes)


def read_classifier(hf: HFConfig) -> Classifier | None:
    """Reads the labels and the activation of a sequence classifier from config.json; None: the checkpoint is
    none.

    The activation is the one that sentence-transformers states for cross-encoders, else that of
    `problem_type`, else softmax, or sigmoid for one label (as vLLM does).

    Raises:
        CheckpointError: a value is wrong, or the activation is not supported.
    """
    if not hf.architecture.endswith(CLASSIFIER):
        return None
    labels = _labels(hf)
    problem = hf.get("problem_type")
    activation: Activation = "softmax" if len(labels) > 1 else "sigmoid"
    if problem is not None:
        if not isinstance(problem, str) or problem not in _PROBLEM_TYPES:
            raise hf.error(f"problem_type must be one of {', '.join(_PROBLEM_TYPES)}, got {problem!r:.80}")
        activation = _PROBLEM_TYPES[problem]
    nested = hf.get("sentence_transformers", {})
    stated = hf.get("sbert_ce_default_activation_function")
    if isinstance(nested, Mapping) and nested.get("activation_fn") is not None:
        stated = nested["activation_fn"]
    if stated is not None:
        name = str(stated).rpartition(".")[2]
        if name not in _FUNCTIONS:
            raise hf.error(
                f"activation {stated!r:.80} of scores is not supported; supported: {', '.join(_FUNCTIONS)}"
            )
        activation = _FUNCTIONS[name]
    return Classifier(labels, activation)


def with_classifier(pooling: Pooling, classifier: Classifier, mode: PoolingMode) -> Pooling:
    """Returns the pooling of a sequence classifier, which gives scores and neither embeddings nor tokens."""
    return replace(
        pooling,
        mode=mode,
        classifier=classifier,
        generates=False,
        why_not="the checkpoint is a classifier, which gives scores",
    )


def _labels(hf: HFConfig) -> tuple[str, ...]:
    """Returns the labels' names in the order of the scores: those of `id2label`, else LABEL_0, LABEL_1 and so
    on, as many as `num_labels` says (2 by default), as transformers does. Raises CheckpointError."""
    named = hf.get("id2label")
    if named is None:
        return tuple(f"LABEL_{index}" for index in range(hf.require_int("num_labels", 2, most=MAX_LABELS)))
    if not isinstance(named, Mapping) or not 1 <= len(named) <= MAX_LABELS:
        raise hf.error(f"id2label must name 1 to {MAX_LABELS} labels")
    found = [name for index in range(len(named)) if isinstance(name := named.get(str(index)), str)]
    if len(found) != len(named) or max(map(len, found)) > MAX_LABEL_LENGTH:
        raise hf.error(
            f"id2label must name label 0 to {len(named) - 1}, in {MAX_LABEL_LENGTH} characters each at most"
        )
    return tuple(found)


def _folder(file: Path, name: Any) -> Path:
    """Returns the folder `name`, which modules.json (`file`) names for a module and which lies beside it.
    Raises CheckpointError if `name` is not the plain name of a folder, or the folder must not be read."""
    if not isinstance(name, str) or not is_name(name) or Path(name).name != name or name == "..":
        raise CheckpointError(f"{file}: {shown(name)} is not the name of a folder beside it")
    folder = file.with_name(name)
    if folder.is_dir():
        check_directory(folder, CheckpointError)
    return folder
