"""Kinds of gradients, adapters, embeddings and labels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cift_probe.compat.case import Case, Judgement

IGNORED = -100  # torch.nn.CrossEntropyLoss, ignore_index
_MOVED_SHARE = 0.95  # of lora_B that a sound run has moved after some steps


def input_gradients(case: Case) -> Judgement | None:
    """Tell re-entrant checkpointing over inputs that need no gradient."""
    moved, total = case.number("nonzero", "num_nonzero", "moved"), case.number("total", "num_total")
    if moved is not None and total and case.number("steps") == 0:
        reason = "before the first step every lora_B is zero"
        return Judgement("checkpointing_no_input_grads", "unknown", reason)
    if moved is not None and total:
        reason = f"{moved:g} of {total:g} lora_B have moved"
        sound = moved / total >= _MOVED_SHARE
        return Judgement("checkpointing_no_input_grads", "pass" if sound else "fail", reason)
    zero = case.number("zero_lora_b", "num_zero", "lora_b_zero", "still_zero")
    if zero is not None:
        share = zero / total if total else float(zero > 0)
        stuck = share > 1 - _MOVED_SHARE
        reason = f"{zero:g} lora_B are still zero"
        return Judgement("checkpointing_no_input_grads", "fail" if stuck else "pass", reason)
    on = case.flag("grad_checkpointing", "gradient_checkpointing", "checkpointing")
    reentrant = case.flag("use_reentrant", "reentrant")
    inputs = case.flag("input_require_grads", "inputs_require_grad", "enable_input_require_grads")
    frozen = case.flag("embeddings_frozen", "frozen_embeddings", "embed_frozen")
    if on is None:
        return None
    if not on or reentrant is False or inputs or frozen is False:
        return Judgement("checkpointing_no_input_grads", "pass", "gradients reach the adapters")
    if reentrant is None or inputs is None:
        return Judgement(
            "checkpointing_no_input_grads",
            "unknown",
            "use_reentrant or input_require_grads is not told",
        )
    reason = "re-entrant checkpointing over inputs that need no gradient"
    return Judgement("checkpointing_no_input_grads", "fail", reason)


def trainable(case: Case) -> Judgement | None:
    """Count what requires a gradient at the start of training."""
    count = case.number("trainable", "num_trainable", "trainable_params", "trainable_parameters")
    if count is None:
        return None
    reason = f"{count:g} parameters are trainable"
    return Judgement("no_trainable_parameters", "pass" if count else "fail", reason)


def targets(case: Case) -> Judgement | None:
    """Hold the requested target modules against those that carry an adapter."""
    asked, applied = (
        case.get("requested", "target_modules", "requested_targets"),
        case.get("applied", "applied_targets", "adapted"),
    )
    if isinstance(asked, str):
        asked = [name.strip() for name in asked.split(",")]
    if not isinstance(asked, list | tuple) or not isinstance(applied, list | tuple):
        return None
    bare = [name for name in asked if not _carries(str(name), applied)]
    if bare:
        return Judgement(
            "adapter_target_missing", "fail", f"no adapter on {', '.join(map(str, bare))}"
        )
    return Judgement("adapter_target_missing", "pass", "every requested module has its adapter")


def _carries(name: str, applied: Iterable[Any]) -> bool:
    return any(str(item) == name or str(item).endswith(f".{name}") for item in applied)


def tied(case: Case) -> Judgement | None:
    """Tell tied embeddings that are no longer one: storage, or logits after save and reload."""
    tie = case.flag("tie_word_embeddings", "tied", "config_tied")
    one = case.flag(
        "ptr_equal_after_peft",
        "ptr_equal",
        "same_storage",
        "ptr_equal_after_reload",
        "data_ptr_equal",
        "shared_after_reload",
    )
    moved = case.number("logits_diff", "max_logit_diff", "logit_difference", "logits_max_diff")
    if tie is None or (one is None and moved is None):
        return None
    if not tie:
        return Judgement(
            "tied_embeddings_broken", "not_applicable", "the configuration ties nothing"
        )
    if one is not False and moved is not None and moved > 1e-2:  # noqa: PLR2004 - as below
        one = None
    if one is False:
        return Judgement(
            "tied_embeddings_broken", "fail", "input embedding and head are two tensors"
        )
    if moved is not None and moved > 1e-2:  # noqa: PLR2004 - bf16 rounding of a logit near 1
        return Judgement(
            "tied_embeddings_broken", "fail", f"logits differ by {moved:g} after reload"
        )
    return Judgement("tied_embeddings_broken", "pass", "input embedding and head are one tensor")


def embeddings_saved(case: Case) -> Judgement | None:
    """Tell embeddings that train and are not in the saved adapter."""
    trains = case.flag(
        "embed_requires_grad", "embeddings_require_grad", "embeddings_trainable", "embed_trainable"
    )
    saved = case.flag(
        "adapter_has_embed", "embeddings_in_adapter", "saved_embeddings", "embed_saved"
    )
    keys = case.get("adapter_keys", "saved_keys", "keys")
    if saved is None and isinstance(keys, list | tuple):
        saved = any(
            "embed" in str(key) or "lm_head" in str(key) or "wte" in str(key) for key in keys
        )
    if trains is None or saved is None:
        return None
    if trains and not saved:
        return Judgement("embeddings_not_saved", "fail", "embeddings train, the adapter lacks them")
    return Judgement("embeddings_not_saved", "pass", "what trains is saved")


def labels(case: Case) -> Judgement | None:
    """Count the labels that count: per batch, per row, and whether the end token is one."""
    rows = case.get("labels")
    if isinstance(rows, list) and rows:
        return _labels_of(case, rows)
    masked, total = (
        case.number("rows_without_labels", "empty_rows", "masked_rows"),
        case.number("rows", "num_rows"),
    )
    if masked is None and total is not None:
        with_labels = case.number("rows_with_labels")
        masked = None if with_labels is None else total - with_labels
    counts = case.get(
        "supervised_tokens", "supervised_per_batch", "num_supervised", "labels_per_row"
    )
    if masked is None and isinstance(counts, list):
        masked, total = float(sum(1 for item in counts if not item)), float(len(counts))
    if masked is None and isinstance(counts, int) and not isinstance(counts, bool):
        masked, total = (1.0, 1.0) if counts == 0 else (0.0, 1.0)
    if masked is None:
        return _cut(case) or _template(case)
    evaluating = str(case.get("split") or "train").lower() in {"eval", "validation", "test", "dev"}
    reason = f"{masked:g} of {total or masked:g} rows have no label that counts"
    if not masked:
        return Judgement("labels_all_masked", "pass", reason)
    whole = (total is not None and masked >= total) or case.has("batches_without_labels")
    return Judgement("labels_all_masked", "fail" if whole and not evaluating else "warn", reason)


def _labels_of(case: Case, rows: list[Any]) -> Judgement:
    nested = [row for row in rows if isinstance(row, list)] or [rows]
    empty = sum(all(item == IGNORED for item in row) for row in nested)
    evaluating = str(case.get("split") or "train").lower() in {"eval", "validation", "test", "dev"}
    if empty:
        batch = empty == len(nested) and not evaluating
        reason = f"{empty} of {len(nested)} rows have no label that counts"
        return Judgement("labels_all_masked", "fail" if batch else "warn", reason)
    end = case.number("eos_token_id", "eos", "eos_id")
    if end is not None:
        learnt = any(int(end) == item for row in nested for item in row)
        reason = f"the end token {end:g} is {'' if learnt else 'never '}among the labels that count"
        return Judgement("eos_not_supervised", "pass" if learnt else "fail", reason)
    return Judgement("labels_all_masked", "pass", "every row has labels that count")


def _cut(case: Case) -> Judgement | None:
    """Tell prompts that alone fill the length to which rows are cut."""
    prompt = case.number("prompt_tokens", "prompt_length", "prompt_len")
    longest = case.number("max_length", "max_seq_length", "max_len", "cutoff_len", "block_size")
    if prompt is None or longest is None:
        return None
    reason = f"the prompt takes {prompt:g} of {longest:g} tokens"
    return Judgement("labels_all_masked", "fail" if prompt >= longest else "pass", reason)


def _template(case: Case) -> Judgement | None:
    template = case.get("template", "chat_template")
    only = case.flag("assistant_only_loss", "assistant_only", "train_on_responses_only")
    if template is None or only is None:
        return None
    marks = "generation" in str(template) and "endgeneration" in str(template)
    if only and not marks:
        reason = "assistant-only loss, and the template marks no generation"
        return Judgement("labels_all_masked", "fail", reason)
    return Judgement("labels_all_masked", "pass", "the template marks what the loss is about")


def end_token(case: Case) -> Judgement | None:
    """Tell an end token that is never a target: it is the padding token, or told so."""
    learnt = case.flag("eos_in_labels", "eos_supervised", "eos_among_labels")
    if learnt is not None:
        text = "among" if learnt else "never among"
        return Judgement(
            "eos_not_supervised",
            "pass" if learnt else "fail",
            f"the end token is {text} the labels that count",
        )
    count = case.number("eos_label_count", "num_eos_labels", "eos_labels")
    if count is not None:
        return Judgement(
            "eos_not_supervised",
            "fail" if count == 0 else "pass",
            f"{count:g} labels are the end token",
        )
    pad, end = (
        case.get("pad_token_id", "pad_token", "pad_id"),
        case.get("eos_token_id", "eos_token", "eos_id"),
    )
    masks = case.flag("pad_masked", "mask_pad", "collator_masks_pad", "pad_tokens_masked")
    if masks is None and "languagemodeling" in str(case.get("collator") or "").lower():
        masks = True  # transformers/data/data_collator.py: labels of the padding token become -100
    if pad is None or end is None or case.has("labels"):
        return None
    if pad == end and masks is not False:
        return Judgement(
            "eos_not_supervised",
            "fail" if masks else "warn",
            "padding is the end token, and padding is masked",
        )
    return Judgement("eos_not_supervised", "pass", "padding is another token than the end")


JUDGES = (input_gradients, trainable, targets, tied, embeddings_saved, labels, end_token)
