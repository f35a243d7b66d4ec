"""What people call things: other names of the fields that judges ask for.

Collected from bug trackers, log parsers and our own cases. A field under its own name wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# field: other names. Sizes are listed without their unit, which stays (`_gib`, `_bytes`).
_OTHERS: Mapping[str, tuple[str, ...]] = {
    "code": ("init_code", "start_code", "cuda_init_code"),
    "nvml_ok": ("nvml_works", "smi_works"),
    "libcuda": ("libcuda_version", "loaded_libcuda"),
    "compat_libcuda": ("compat_package",),
    "gpu": ("gpu_name", "product_line", "device", "card"),
    "nvswitch": ("has_nvswitch",),
    "library_version": ("nvml_library_version",),
    "error": ("smi_result", "nvml_result"),
    "in_container": ("containerized", "docker", "inside_container"),
    "arch_list": ("torch_arch_flags", "arch_flags", "torch_arch_list"),
    "kernel_ran": ("matmul_ok",),
    "torch_warned": ("warned",),
    "torch": ("torch_version", "pytorch"),
    "torch_cuda": ("torch_version_cuda", "cuda_version_of_torch"),
    "library_kernel_ok": ("bnb_kernel_ok",),
    "requires": ("requirements",),
    "kwarg": ("unexpected_argument",),
    "missing": ("missing_libs", "missing_libraries"),
    "loaded": ("loaded_files",),
    "compiled": ("compiled_version",),
    "runtime": ("runtime_version",),
    "glibc": ("libc", "system_glibc"),
    "required": ("wheel_required", "needs"),
    "nvcc": ("cuda_home",),
    "compiles": ("builds",),
    "built_platform": ("built_for_platform",),
    "managed_alloc_ok": ("cuda_malloc_managed_ok", "malloc_managed_ok"),
    "managed_limit": ("managed_max",),
    "wheel_torch": ("built_for_torch",),
    "effective": ("actual_attn", "attn_actual", "attention_in_effect"),
    "requested": ("attn_requested",),
    "bundled_ptxas": ("triton_ptxas_version",),
    "triton_ptxas_path_version": ("ptxas_path_version", "used_ptxas"),
    "required_shared": ("smem_required", "shared_memory_needed"),
    "shared_limit": ("smem_limit",),
    "triton": ("torch_compile",),
    "dtype": ("bnb_4bit_compute_dtype",),
    "flags": ("training_args", "trainer_args"),
    "trained_dtype": ("trained_in",),
    "load": ("model_dtype",),
    "modules_to_save": ("full_finetuning",),
    "fp16_error": ("fp16_max_rel_error", "max_rel_error"),
    "has_nan": ("nan_found",),
    "applied": ("applied_modules", "adapted_modules"),
    "logits_diff": ("logits_diff_after_reload", "logits_difference"),
    "embed_requires_grad": ("train_embeddings",),
    "adapter_has_embed": ("embeddings_saved",),
    "labels_per_row": ("supervised_tokens_per_row", "labels_per_batch"),
    "rows_without_labels": ("num_rows_all_masked", "batches_without_labels"),
    "rows": ("num_rows", "batches", "eval_samples"),
    "listed": ("sum_listed",),
    "vocab": ("vocabulary",),
    "memory_fraction": ("fraction", "per_process_memory_fraction"),
    "pinned_ok": ("largest_pinned",),
    "needed": ("optimizer", "offload"),
    "memory_current": ("cgroup_used",),
    "writable": ("can_write",),
    "optimizer": ("optim",),
    "free": ("disk_free",),
    "params": ("num_params",),
    "num_gpus": ("num_devices",),
    "p2p_on": ("allreduce_with_p2p", "p2p_enabled"),
    "p2p_off": ("allreduce_without_p2p", "p2p_disabled"),
    "sent": ("sent_checksum",),
    "received": ("received_checksum",),
    "per_device_gbps": ("per_gpu",),
    "volatile_uncorrected": ("ecc_uncorrectable_volatile", "ecc_uncorrected"),
    "device_gbps": ("bandwidth_in_vram_gbps",),
    "copy_gbps": ("bandwidth_beyond_gbps",),
    "prompt_tokens": ("prompt_len",),
    "seq": ("max_length", "sequence"),
}
_UNITS = ("", "_b", "_bytes", "_kib", "_kb", "_mib", "_mb", "_gib", "_gb")
_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def named(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields with what is said under other names added under the judges' own."""
    found = dict(fields)
    for name, others in _OTHERS.items():
        for unit in _UNITS:
            for other in others:
                if other + unit in fields and name + unit not in found:
                    found[name + unit] = fields[other + unit]
    settings = {name: fields[name] for name in _SETTINGS if name in fields}
    if settings and "env" not in found:
        found["env"] = settings
    if isinstance(fields.get("conf"), str) and "env" not in found:
        found["env"] = fields["conf"]
    return found
